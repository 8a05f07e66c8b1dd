// The edge from C++ to PostgreSQL: runs C++ code that may throw and keeps what it threw as text, so
// that the caller can ereport it after the handler was left. The other edge, ereport's longjmp into
// C++, is kept out by rule: a function that calls PostgreSQL holds only trivially destructible
// locals (DESIGN 2.7).
#pragma once

#include <cstring>
#include <exception>
#include <new>
#include <utility>

namespace outbox::pg {

// The text of the last exception that guarded() swallowed. One thread.
inline char* guard_text() noexcept {
    static char text[256];
    return text;
}

// Runs `work`; false when it threw. `work` must not call PostgreSQL.
template <class Work>
[[nodiscard]] bool guarded(Work&& work) noexcept {
    const auto keep = [](const char* what) noexcept {
        std::strncpy(guard_text(), what, 255);
        guard_text()[255] = '\0';
    };
    try {
        std::forward<Work>(work)();
        return true;
    } catch (const std::bad_alloc&) {
        keep("out of memory");
    } catch (const std::exception& error) {
        keep(error.what());
    } catch (...) {
        keep("unknown C++ exception");
    }
    return false;
}

} // namespace outbox::pg

// For use after guarded() gave false, outside of any handler.
#define OUTBOX_RAISE_GUARDED()                                                                     \
    ereport(ERROR, (errcode(ERRCODE_INTERNAL_ERROR),                                               \
                    errmsg("outbox: internal error: %s", ::outbox::pg::guard_text())))
