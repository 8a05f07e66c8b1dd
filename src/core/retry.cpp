// The arithmetic of back-off. Must not overflow for any attempt count or policy, since both come
// from a table and from settings that anybody may have edited.
#include "core/retry.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace outbox::core {

namespace {

constexpr Micros kLongest = std::numeric_limits<Micros>::max();

Micros doubled(Micros base, Micros cap, std::int32_t times) noexcept {
    constexpr std::int32_t kValueBits = std::numeric_limits<Micros>::digits;
    const bool reaches_cap = times >= kValueBits || base > (cap >> times);
    return reaches_cap ? cap : base << times;
}

Micros scaled(Micros delay, double factor) noexcept {
    const double product = static_cast<double>(delay) * factor;
    // kLongest itself is no double; the nearest one, 2^63, is already too much.
    if (product >= static_cast<double>(kLongest))
        return kLongest;
    return std::llround(product);
}

} // namespace

Micros back_off(const RetryPolicy& policy, std::int32_t failures, double jitter) noexcept {
    const Micros base = std::max<Micros>(policy.base, 1);
    const Micros cap = std::max(policy.cap, base);
    const Micros delay = doubled(base, cap, std::max(failures, 1) - 1);
    return std::max<Micros>(scaled(delay, 0.8 + 0.4 * jitter), 1);
}

Micros cap_retry_after(Micros asked) noexcept {
    return std::clamp<Micros>(asked, 0, kRetryAfterCap);
}

} // namespace outbox::core
