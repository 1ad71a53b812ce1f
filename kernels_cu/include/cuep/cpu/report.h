// Error messages of the runtime: one line of text, and the place of a launch that the first failure writes it to.
#pragma once

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cstdint>

#pragma GCC visibility push(hidden)
namespace cuep {
namespace cpu {

inline const char* base_name(const char* path) {
    const char* slash = strrchr(path, '/');
    return slash != nullptr ? slash + 1 : path;
}

struct Text {
    char chars[2048] = "";
    size_t length = 0;

    __attribute__((format(printf, 2, 3))) void add(const char* format, ...) {
        va_list args;
        va_start(args, format);
        const int added = vsnprintf(chars + length, sizeof(chars) - length, format, args);
        va_end(args);
        if (added > 0) length = length + size_t(added) < sizeof(chars) ? length + size_t(added) : sizeof(chars) - 1;
    }
};

// The first error of a launch. Every block looks at is_set() when it switches fibers, and ends.
struct Error {
    char* text;
    uint64_t text_bytes;
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    bool flag = false;

    Error(char* text_, uint64_t text_bytes_) : text(text_), text_bytes(text_bytes_) {}

    bool is_set() const { return __atomic_load_n(&flag, __ATOMIC_RELAXED); }

    void set(const Text& message) {
        pthread_mutex_lock(&mutex);
        if (!flag && text_bytes > 0) snprintf(text, text_bytes, "%s", message.chars);
        __atomic_store_n(&flag, true, __ATOMIC_RELAXED);
        pthread_mutex_unlock(&mutex);
    }
};

}  // namespace cpu
}  // namespace cuep
#pragma GCC visibility pop
