// See lane_back_off.hpp.
#include "core/lane_back_off.hpp"

namespace outbox::core {

namespace {
constexpr RetryPolicy kPolicy{.base = kSecond, .cap = 60 * kSecond};
constexpr std::size_t kMaxLanes = 10'000; // more start anew
} // namespace

Micros LaneBackOff::failed(const std::string& lane, Micros now, double jitter) {
    if (lanes_.size() >= kMaxLanes) {
        lanes_.clear();
    }
    State& state = lanes_[lane];
    const bool steps_up = state.steps == 0 || now >= state.next_step_at;
    if (steps_up && state.steps < 30) {
        ++state.steps;
    }
    const Micros wait = back_off(kPolicy, state.steps, jitter);
    if (steps_up) {
        state.next_step_at = now + wait / 2;
    }
    return wait;
}

} // namespace outbox::core
