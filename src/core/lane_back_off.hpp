// How long the events of a lane wait while its endpoint as a whole fails: doubling from a second to
// a minute. A wave of requests that fail together is one step, not many. A success ends it. No
// clock: the caller brings the time.
#pragma once

#include <unordered_map>

#include "core/retry.hpp"
#include "core/types.hpp"

namespace outbox::core {

class LaneBackOff {
  public:
    // A lane-class failure at `now`; how long its event waits. `jitter` in [0, 1).
    [[nodiscard]] Micros failed(const std::string& lane, Micros now, double jitter);
    void succeeded(const std::string& lane) { lanes_.erase(lane); }
    // Lanes that failed last.
    [[nodiscard]] std::size_t failing() const noexcept { return lanes_.size(); }

  private:
    struct State {
        std::int32_t steps = 0;
        Micros next_step_at = 0;
    };
    std::unordered_map<std::string, State> lanes_;
};

} // namespace outbox::core
