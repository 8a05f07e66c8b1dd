// When a failed event is tried again. Pure arithmetic: no clock, no random source; the caller
// brings both.
#pragma once

#include "core/types.hpp"

namespace outbox::core {

struct RetryPolicy {
    Micros base = kSecond;                  // > 0
    Micros cap = Micros{15} * 60 * kSecond; // >= base, else base counts as cap
};

// The longest Retry-After that is honoured.
constexpr Micros kRetryAfterCap = kHour;

// Delay before the next try after `failures` failures in a row (any value; < 1 counts as 1): base
// doubling up to cap, then scaled by `jitter` in [0, 1) to 80 %..120 %. Never overflows, never < 1.
[[nodiscard]] Micros back_off(const RetryPolicy& policy, std::int32_t failures,
                              double jitter) noexcept;

// The delay a receiver asked for, cut to [0, kRetryAfterCap].
[[nodiscard]] Micros cap_retry_after(Micros asked) noexcept;

} // namespace outbox::core
