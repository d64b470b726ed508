// Rooms: memory whose neighbours nobody may touch, not even to read. A page that is not there lies before a room's first number
// or behind its last one; what else is in the room's pages holds a pattern, which must stay.
#pragma once
#include "packs.h"
#include "threads.h"

#include <csignal>
#include <sys/mman.h>
#include <unistd.h>

constexpr u8 PATTERN = 0x5a;

template <class T> struct Room {
    size_t bytes, of_pages, before;
    u8* pages;

    Room(Draw& draw, size_t count) : bytes(count * sizeof(T)) {
        const size_t page = sysconf(_SC_PAGESIZE);
        of_pages = (bytes + page) / page * page, before = draw.below(2) ? 0 : of_pages - bytes;
        pages = (u8*)mmap(nullptr, of_pages + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) + page;
        mprotect(pages, of_pages, PROT_READ | PROT_WRITE);
        memset(pages, PATTERN, of_pages);
    }
    Room(Draw& draw, const std::vector<T>& numbers) : Room(draw, numbers.size()) { put(numbers); }
    Room(const Room&) = delete;
    ~Room() {
        const size_t page = sysconf(_SC_PAGESIZE);
        munmap(pages - page, of_pages + 2 * page);
    }

    T* begin() { return (T*)(pages + before); }
    void put(const std::vector<T>& numbers) { memcpy(begin(), numbers.data(), bytes); }
    // From now on nobody may write here.
    const T* read_only() {
        mprotect(pages, of_pages, PROT_READ);
        return begin();
    }
    bool holds(const std::vector<T>& numbers) const {
        const auto is_kept = [](u8 byte) { return byte == PATTERN; };
        return memcmp(pages + before, numbers.data(), bytes) == 0 && std::all_of(pages, pages + before, is_kept)
            && std::all_of(pages + before + bytes, pages + of_pages, is_kept);
    }
};

// Ends the program at once: a thread's stack is no place for what `exit` does.
inline void end_with(const char* said) {
    write(STDOUT_FILENO, said, strlen(said));
    _exit(1);
}
// Whoever touches what is not there ends the program.
inline void watch_rooms() {
    for (int sent : {SIGSEGV, SIGBUS}) signal(sent, [](int) { end_with("outside of a tensor\n"); });
}
