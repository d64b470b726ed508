// Attention of packed sequences, forward, f32: one block for each query and head. It shows how a library that is written in
// CUDA C++ is checked from Python, and is not meant to be fast.
//
//     nvcc -O3 -arch=native -shared -Xcompiler -fPIC -o libattention.so attention.cu

#include <cuda_runtime.h>
#include <math.h>

namespace {

__global__ void attend(const float *q, const float *k, const float *v, float *out, float *lse, const int *cu_q, const int *cu_k,
                       int rows, int heads, int group, int d, int dv, float scale, int left, int right) {
    const int sequence = blockIdx.z, head = blockIdx.y, i = blockIdx.x;
    const int first_q = cu_q[sequence], lq = cu_q[sequence + 1] - first_q;
    const int first_k = cu_k[sequence], lk = cu_k[sequence + 1] - first_k;
    if (i >= lq) return;
    const int kv_heads = heads / group, at = i + lk - lq;
    const int from = left < 0 ? 0 : max(0, at - left), to = right < 0 ? lk : min(lk, at + right + 1);
    const float *query = q + (size_t(first_q + i) * heads + head) * d;
    float *result = out + (size_t(first_q + i) * heads + head) * dv;

    // Each thread has its own lanes of the values, and all compute the same weights.
    float top = -INFINITY, total = 0;
    for (int j = from; j < to; ++j) {
        const float *key = k + (size_t(first_k + j) * kv_heads + head / group) * d;
        float logit = 0;
        for (int lane = 0; lane < d; ++lane) logit += query[lane] * key[lane];
        logit *= scale;
        const float base = fmaxf(top, logit), kept = expf(top - base), weight = expf(logit - base);
        for (int lane = threadIdx.x; lane < dv; lane += blockDim.x) {
            const float value = v[(size_t(first_k + j) * kv_heads + head / group) * dv + lane];
            result[lane] = (j == from ? 0 : result[lane] * kept) + weight * value;
        }
        total = total * kept + weight;
        top = base;
    }
    for (int lane = threadIdx.x; lane < dv; lane += blockDim.x) result[lane] = from < to ? result[lane] / total : 0;
    if (threadIdx.x == 0) lse[size_t(head) * rows + first_q + i] = from < to ? top + logf(total) : -INFINITY;
}

}  // namespace

// Returns a `cudaError_t`. All pointers are of the device; `rows` is the number of rows of q.
extern "C" int attention_forward(const float *q, const float *k, const float *v, float *out, float *lse, const int *cu_q,
                                 const int *cu_k, int sequences, int longest_q, int rows, int heads, int group, int d, int dv,
                                 float scale, int left, int right, void *stream) {
    if (sequences == 0 || longest_q == 0) return 0;
    const dim3 grid(longest_q, heads, sequences);
    attend<<<grid, 64, 0, static_cast<cudaStream_t>(stream)>>>(q, k, v, out, lse, cu_q, cu_k, rows, heads, group, d, dv, scale, left,
                                                               right);
    return static_cast<int>(cudaGetLastError());
}
