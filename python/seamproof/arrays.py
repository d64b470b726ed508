"""Array libraries: numpy, torch, JAX and CuPy, each behind the same few functions.

`put` and `get` change no bit of a number, and `get` turns the code of an unwritten element into its f32 bits.
"""

from __future__ import annotations

import functools
import itertools
import platform
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .copies import Copies, TorchCopies
from .errors import DeclarationError, NotHere
from .formats import FP8, UNWRITTEN, UNWRITTEN_8, UNWRITTEN_16, narrow, widen

# Elements of a guard band: 4096 bytes of f32, so that the array behind it is aligned as an allocation is.
GUARD = 1024
# Bytes to which inputs that lie in one allocation are aligned, and the least between two of them.
ALIGNMENT, GAP = 512, 256


class Numpy:
    """numpy on the CPU; bf16 is the type of `ml_dtypes`, where that is installed."""

    name = "numpy"
    mutable = True
    # Whether a kernel may still run when its call has returned.
    asynchronous = False

    def __init__(self, device: str | None = None, ordinal: int = 0):
        if device not in (None, "cpu"):
            raise DeclarationError(f'arrays="numpy" are on the CPU: device={device!r} cannot be')

    def dtype(self, form: str) -> Any:
        """Returns the library's type of a format."""
        return numpy_dtype(form)

    def put(self, values: np.ndarray, form: str) -> Any:
        """Returns f32 values as an array of a format."""
        if form == "f32":
            return np.array(values)
        return narrow(values, form).view(self.dtype(form))

    def put_all(self, values: Mapping[str, tuple[np.ndarray, str]]) -> dict[str, Any]:
        """Returns arrays of f32 values and their formats, by name."""
        return {name: self.put(array, form) for name, (array, form) in values.items()}

    def get(self, array: Any, form: str, what: str) -> np.ndarray:
        """Returns an array of a format as f32. An array of another format is an error that names it."""
        array = np.asarray(array)
        if form == "f32":
            return as_f32(array, what)
        if array.dtype != self.dtype(form):
            raise wrong_dtype(what, array.dtype, form)
        array = np.ascontiguousarray(array)
        return widen(array.view(np.uint8 if form in FP8 else np.uint16), form)

    def integers(self, values: Sequence[int]) -> Any:
        """Returns integers as an i32 array."""
        return np.asarray(values, np.int32)

    def unwritten(self, elements: int, form: str) -> Any:
        """Returns a flat array of a format that is full of the sentinel."""
        if form == "f32":
            return np.full(elements, UNWRITTEN, np.uint32).view(np.float32)
        if form in FP8:
            return np.full(elements, UNWRITTEN_8, np.uint8).view(self.dtype(form))
        return np.full(elements, UNWRITTEN_16, np.uint16).view(self.dtype(form))

    def dirty(self, shapes: Sequence[tuple[int, str]]) -> None:
        """Leaves the sentinel in freed memory of these numbers of elements and formats.

        A kernel that allocates its results and forgets to write some of them often gets this very memory.
        """
        if self.mutable:
            # All at once, so that each is another piece of memory.
            _ = [self.unwritten(elements, form) for elements, form in shapes]

    def copies(self, arrays: Mapping[Any, Any]) -> Copies:
        """Returns copies on the same device, made as the arrays are when the caller's stream comes to them."""
        return Copies({name: np.array(array) for name, array in arrays.items()})

    @functools.lru_cache(maxsize=64)  # noqa: B019 (a process has one library)
    def intact_bands(self, forms: tuple[str, ...]) -> Copies:
        """Returns copies of the untouched guard bands before and after arrays of these formats."""
        bands = {form: self.unwritten(GUARD, form) for form in set(forms)}
        sides = ((number, before) for number in range(len(forms)) for before in (True, False))
        return self.copies({(number, before): bands[forms[number]] for number, before in sides})

    def fetched(
        self, copies: Sequence[Copies], pairs: Sequence[tuple[Copies, Copies]]
    ) -> tuple[list[dict[Any, Any]], list[bool]]:
        """Returns the arrays of copies, and for each pair of copies whether they differ in a bit.

        The arrays are on the host where the library can move all of this there at once.
        """
        return [each.arrays for each in copies], [bool(one.differing(other)) for one, other in pairs]

    def is_array(self, value: Any) -> bool:
        """Returns whether a value is an array of the library on its device."""
        return isinstance(value, np.ndarray)

    def finish(self) -> None:
        """Waits until the whole device is idle, whichever stream a kernel chose."""

    def begin(self) -> None:
        """Begins to measure the cost of a run."""

    def costs(self) -> dict[str, int]:
        """Returns what a run has cost since `begin`, as far as it is known: `peak_bytes`."""
        return {}

    def versions(self) -> dict[str, str]:
        """Returns the versions of what runs."""
        return {"python": platform.python_version(), "numpy": np.__version__}

    def device_name(self) -> str:
        """Returns the name of the device; empty for the CPU."""
        return ""

    def devices(self) -> int:
        """Returns how many devices the subject could be opened on."""
        return 1

    def out_of_memory(self, error: BaseException) -> bool:
        """Returns whether an error says that the device has no memory left."""
        return isinstance(error, MemoryError)

    def lost(self, error: BaseException) -> bool:
        """Returns whether an error has spoilt the device for the rest of this process."""
        return False

    def record(self, function: Any, inputs: list[Any]) -> tuple[Any, Any]:
        """Returns what the function returns for the inputs, and a function that gives the inputs' gradients.

        That one takes dout, and whether any query sees a key: only then must out depend on the inputs.
        """

        def pullback(dout: Any, depends: bool) -> Any:
            raise DeclarationError(
                f"{self.name} has no automatic differentiation: return dq, dk and dv, or declare backward=False"
            )

        return function(*inputs), pullback


class Torch(Numpy):
    """torch, on the CPU or a GPU."""

    name = "torch"

    def __init__(self, device: str | None = None, ordinal: int = 0):
        import torch

        self.torch = torch
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cuda":
            device = f"cuda:{ordinal}"
        self.device = torch.device(device)
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise NotHere("torch finds no GPU")
        self.asynchronous = self.device.type == "cuda"
        if self.asynchronous:
            torch.cuda.set_device(self.device)

    def dtype(self, form: str) -> Any:
        torch = self.torch
        names = {
            "f32": "float32",
            "bf16": "bfloat16",
            "fp16": "float16",
            "e4m3": "float8_e4m3fn",
            "e5m2": "float8_e5m2",
        }
        return getattr(torch, names[form])

    def put(self, values: np.ndarray, form: str) -> Any:
        if form == "f32":
            return self.torch.from_numpy(np.array(values)).to(self.device)
        codes = narrow(values, form)
        codes = self.torch.from_numpy(codes.view(np.int16 if codes.itemsize == 2 else np.uint8))
        return codes.view(self.dtype(form)).to(self.device)

    def put_all(self, values: Mapping[str, tuple[np.ndarray, str]]) -> dict[str, Any]:
        if not self.asynchronous:
            return super().put_all(values)
        named = {name: (self._codes(array, form), form) for name, (array, form) in values.items()}
        places, end = {}, 0
        for name, (codes, _) in named.items():
            places[name] = slice(end, end + codes.nbytes)
            end += -(-(codes.nbytes + GAP) // ALIGNMENT) * ALIGNMENT
        # One copy in place of one for each. What lies between two inputs is NaN in any format, so that a kernel that
        # reads beyond one does not find ordinary numbers there. numpy fills the host's side, as torch would with all
        # cores: a dozen workers that did so took half of each other's time.
        host = np.full(end, 0xFF, np.uint8)
        for name, (codes, _) in named.items():
            host[places[name]] = codes.reshape(-1).view(np.uint8)
        device = self.torch.from_numpy(host).to(self.device)
        return {
            name: device[places[name]].view(self.dtype(form)).reshape(codes.shape)
            for name, (codes, form) in named.items()
        }

    @staticmethod
    def _codes(values: np.ndarray, form: str) -> np.ndarray:
        return np.ascontiguousarray(values) if form == "f32" else narrow(values, form)

    def get(self, array: Any, form: str, what: str) -> np.ndarray:
        torch = self.torch
        if not torch.is_tensor(array):
            raise TypeError(f"{what} is a {type(array).__name__}, not a tensor of torch")
        array = array.detach()
        if form == "f32":
            if array.dtype not in (torch.float32, torch.float64):
                raise wrong_dtype(what, array.dtype, form)
            return as_f32(array.cpu().numpy(), what)
        if array.dtype != self.dtype(form):
            raise wrong_dtype(what, array.dtype, form)
        if form in FP8:
            return widen(array.contiguous().view(torch.uint8).cpu().numpy(), form)
        return widen(array.contiguous().view(torch.int16).cpu().numpy().view(np.uint16), form)

    def integers(self, values: Sequence[int]) -> Any:
        return self.torch.tensor(list(values), dtype=self.torch.int32, device=self.device)

    def unwritten(self, elements: int, form: str) -> Any:
        torch = self.torch
        kind, code = torch.int16, UNWRITTEN_16
        if form == "f32":
            kind, code = torch.int32, UNWRITTEN
        elif form in FP8:
            kind, code = torch.uint8, UNWRITTEN_8
        return torch.full((elements,), code, dtype=kind, device=self.device).view(self.dtype(form))

    def copies(self, arrays: Mapping[Any, Any]) -> Copies:
        return TorchCopies.of(self.torch, arrays)

    def fetched(
        self, copies: Sequence[Copies], pairs: Sequence[tuple[Copies, Copies]]
    ) -> tuple[list[dict[Any, Any]], list[bool]]:
        told = [(one.bytes != other.bytes).any().view(1) for one, other in pairs if one.arrays]
        parts = [each.bytes for each in copies if each.arrays] + [
            each.view(self.torch.uint8) for each in told
        ]
        if not parts:
            return [{} for _ in copies], [False for _ in pairs]
        # All in one copy, so that the host waits once: other processes may have the device meanwhile.
        whole = self.torch.cat(parts).cpu().numpy()
        ends = list(itertools.accumulate(part.numel() for part in parts))
        pieces = iter(np.split(whole, ends[:-1]))
        moved = [each.moved(self.torch, next(pieces)) if each.arrays else {} for each in copies]
        return moved, [bool(one.arrays) and bool(next(pieces)) for one, _ in pairs]

    def is_array(self, value: Any) -> bool:
        return self.torch.is_tensor(value) and value.device.type == self.device.type

    def finish(self) -> None:
        if self.asynchronous:
            self.torch.cuda.synchronize(self.device)

    def begin(self) -> None:
        if self.device.type == "cuda":
            self.torch.cuda.reset_peak_memory_stats(self.device)

    def costs(self) -> dict[str, int]:
        if self.device.type != "cuda":
            return {}
        # `max_memory_allocated` flattens some 200 counters to find this one, which takes as long as a small kernel.
        counters = self.torch.cuda.memory_stats_as_nested_dict(self.device)
        return {"peak_bytes": counters["allocated_bytes"]["all"]["peak"]}

    def versions(self) -> dict[str, str]:
        found = {**super().versions(), "torch": str(self.torch.__version__)}
        if self.device.type == "cuda":
            cudnn = self.torch.backends.cudnn.version()
            found |= {"cuda": str(self.torch.version.cuda), "cudnn": str(cudnn), "device": self.device_name()}
        return found

    def device_name(self) -> str:
        return self.torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else ""

    def devices(self) -> int:
        return max(1, self.torch.cuda.device_count()) if self.device.type == "cuda" else 1

    def out_of_memory(self, error: BaseException) -> bool:
        kinds = (self.torch.cuda.OutOfMemoryError, MemoryError)
        # The CPU's allocator has no error of its own.
        return isinstance(error, kinds) or "can't allocate memory" in str(error)

    def lost(self, error: BaseException) -> bool:
        try:
            self.finish()
        except RuntimeError:
            return True
        return False

    def record(self, function: Any, inputs: list[Any]) -> tuple[Any, Any]:
        torch = self.torch
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        result = function(*leaves)

        def pullback(dout: Any, depends: bool) -> Any:
            if not result.out.requires_grad and not depends:
                return [torch.zeros_like(leaf) for leaf in leaves]
            if not result.out.requires_grad:
                raise RuntimeError(
                    "out has no gradient: the function leaves torch's automatic differentiation; return dq, dk and "
                    "dv, or declare backward=False"
                )
            # A function may return no slack.
            dout = dout[: result.out.shape[0]]
            found = torch.autograd.grad(result.out, leaves, dout, allow_unused=True)
            pairs = zip(leaves, found, strict=True)
            return [torch.zeros_like(leaf) if gradient is None else gradient for leaf, gradient in pairs]

        return result, pullback


class Jax(Numpy):
    """JAX, on the device that it chooses, or the one that is named."""

    name = "jax"
    mutable = False

    def __init__(self, device: str | None = None, ordinal: int = 0):
        import os

        # A second process on the same GPU finds no memory otherwise.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        import jax

        self.jax = jax
        self._traces = False
        platform_name, _, number = (device or "").partition(":")
        try:
            found = jax.devices({"cuda": "gpu"}.get(platform_name, platform_name) or None)
        except RuntimeError as error:  # no such platform
            raise NotHere(error) from error
        at = int(number) if number else min(ordinal, len(found) - 1)
        self.device = found[at]
        self._count = len(found)

    def put(self, values: np.ndarray, form: str) -> Any:
        return self.jax.device_put(super().put(values, form), self.device)

    def get(self, array: Any, form: str, what: str) -> np.ndarray:
        return super().get(np.asarray(array), form, what)

    def integers(self, values: Sequence[int]) -> Any:
        return self.jax.device_put(np.asarray(values, np.int32), self.device)

    def unwritten(self, elements: int, form: str) -> Any:
        raise DeclarationError("arrays of JAX cannot be written to: return new ones")

    def finish(self) -> None:
        self.jax.effects_barrier()

    def versions(self) -> dict[str, str]:
        found = {**super().versions(), "jax": self.jax.__version__}
        return found if self.device_name() == "" else found | {"device": self.device_name()}

    def device_name(self) -> str:
        return "" if self.device.platform == "cpu" else self.device.device_kind

    def devices(self) -> int:
        return self._count if self.device.platform != "cpu" else 1

    def out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)

    def lost(self, error: BaseException) -> bool:
        return self.device.platform != "cpu" and "CUDA_ERROR" in str(error)

    def record(self, function: Any, inputs: list[Any]) -> tuple[Any, Any]:
        # A function that gives its own gradients may use numpy, which cannot be traced.
        if not self._traces:
            result = function(*inputs)
            self._traces = result.grads is not None
        return self._traced(function, inputs) if self._traces else (result, None)

    def _traced(self, function: Any, inputs: list[Any]) -> tuple[Any, Any]:
        kinds = []

        def traced(*leaves: Any) -> Any:
            result = function(*leaves)
            kinds.append(type(result))
            fields = vars(result)
            out, grads = fields["out"], fields["grads"]
            kinds.append(grads)
            return out, {name: value for name, value in fields.items() if name not in ("out", "grads")}

        out, pullback, rest = self.jax.vjp(traced, *inputs, has_aux=True)
        return kinds[0](out, grads=kinds[1], **rest), lambda dout, depends: pullback(dout[: out.shape[0]])


class Cupy(Numpy):
    """CuPy on a GPU, in f32 and fp16."""

    name = "cupy"
    asynchronous = True

    def __init__(self, device: str | None = None, ordinal: int = 0):
        import cupy

        self.cupy = cupy
        number = (device or "cuda").partition(":")[2]
        cupy.cuda.Device(int(number) if number else ordinal).use()

    def dtype(self, form: str) -> Any:
        if form == "bf16":
            raise DeclarationError('CuPy has no bf16: use formats=["fp16"], or arrays="torch"')
        return {"f32": np.float32, "fp16": np.float16}[form]

    def put(self, values: np.ndarray, form: str) -> Any:
        return self.cupy.asarray(super().put(values, form))

    def get(self, array: Any, form: str, what: str) -> np.ndarray:
        return super().get(self.cupy.asnumpy(array), form, what)

    def integers(self, values: Sequence[int]) -> Any:
        return self.cupy.asarray(super().integers(values))

    def unwritten(self, elements: int, form: str) -> Any:
        return self.cupy.asarray(super().unwritten(elements, form))

    def copies(self, arrays: Mapping[Any, Any]) -> Copies:
        return Copies({name: self.cupy.array(array) for name, array in arrays.items()})

    def is_array(self, value: Any) -> bool:
        return isinstance(value, self.cupy.ndarray)

    def finish(self) -> None:
        self.cupy.cuda.Device().synchronize()

    def versions(self) -> dict[str, str]:
        return {**super().versions(), "cupy": self.cupy.__version__, "device": self.device_name()}

    def device_name(self) -> str:
        properties = self.cupy.cuda.runtime.getDeviceProperties(self.cupy.cuda.Device().id)
        return properties["name"].decode()

    def devices(self) -> int:
        return self.cupy.cuda.runtime.getDeviceCount()

    def out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, (self.cupy.cuda.memory.OutOfMemoryError, MemoryError))

    def lost(self, error: BaseException) -> bool:
        try:
            self.finish()
        except self.cupy.cuda.runtime.CUDARuntimeError:
            return True
        return False


LIBRARIES = {"numpy": Numpy, "torch": Torch, "jax": Jax, "cupy": Cupy}


def library(name: str) -> type[Numpy]:
    """Returns the library of that name."""
    if name not in LIBRARIES:
        raise DeclarationError(f"arrays={name!r} is not known; use one of {', '.join(map(repr, LIBRARIES))}")
    return LIBRARIES[name]


@functools.cache
def numpy_dtype(form: str) -> np.dtype:
    """Returns numpy's type of a format."""
    if form == "bf16":
        try:
            import ml_dtypes
        except ImportError:
            raise DeclarationError(
                "numpy has no bf16: install ml_dtypes, or declare formats=['f32', 'fp16'] or arrays='torch'"
            ) from None
        return np.dtype(ml_dtypes.bfloat16)
    if form in FP8:
        try:
            import ml_dtypes
        except ImportError:
            raise DeclarationError(
                f"numpy has no {form}: install ml_dtypes, or declare arrays='torch'"
            ) from None
        return np.dtype({"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}[form])
    return np.dtype({"f32": np.float32, "fp16": np.float16}[form])


def of_function(function: Any) -> str:
    """Returns the library that a function's file imports; numpy where it imports none of the others."""
    return of_names(getattr(function, "__globals__", {}))


def of_names(scope: dict[str, Any]) -> str:
    """Returns the library among the modules that a file's names stand for; numpy where there is none of the others."""
    modules = {value.__name__.partition(".")[0] for value in list(scope.values()) if type(value) is type(sys)}
    return next((name for name in ("torch", "jax", "cupy") if name in modules), "numpy")


def as_f32(array: np.ndarray, what: str) -> np.ndarray:
    """Returns an array of f32, or one of f64 rounded to it: numpy's own rules make f64 of f32 easily."""
    if array.dtype not in (np.float32, np.float64):
        raise wrong_dtype(what, array.dtype, "f32")
    with np.errstate(over="ignore", invalid="ignore"):
        return np.ascontiguousarray(array, np.float32)


def wrong_dtype(what: str, got: Any, form: str) -> TypeError:
    """Returns the error about a result that is not of its declared format."""
    return TypeError(f"{what} came back as {got}, but this problem asks for {form}")
