// The C++ half of a worker: owns the delivery and everything that has a destructor, and gives the
// other half, which calls PostgreSQL, entry points with flat arguments. Calls no PostgreSQL
// function and lets no exception out: what fails returns false (or its safe answer), leaves its
// text in guard_text() and makes broken() true. Then the worker has to end: all state is found
// again in the table. Texts are UTF-8.
#pragma once

#include "net/delivery.hpp"
#include "pg/guard.hpp"

namespace outbox::pg {

struct FlatText {
    const char* data;
    std::size_t size;
};

// Values of the settings, valid during the call only.
struct FlatConfig {
    const char* endpoint; // checked; empty: nothing is sent
    const char* format;
    const char* source;
    const char* const* header_names;
    const char* const* header_values;
    std::size_t headers;
    const char* ca_file;
    std::size_t max_in_flight;
    std::size_t max_bytes;
    std::size_t batch_size;
    core::Micros connect_timeout;
    core::Micros request_timeout;
    core::RetryPolicy retry;
    std::int32_t max_attempts;
    core::Ordering ordering;
};

// What a claim says of a row without touching its payload.
struct FlatRow {
    std::uint8_t id[16];
    FlatText aggregate_type;
    FlatText aggregate_id;
    FlatText event_type;
    std::int64_t seq;
    std::int32_t attempts;
    core::RowVersion row;
    bool has_created_at;
    core::Micros created_at; // Unix time
    bool has_earlier;
    std::int64_t earlier;
};

// One lane to read: as many rows of the range as limit says.
struct LaneRead {
    std::string lane;
    core::SeqRange range;
    std::size_t limit = 0;
};

class Bridge {
  public:
    // Null on failure.
    [[nodiscard]] static Bridge* create(const FlatConfig& config, std::uint32_t seed) noexcept;
    [[nodiscard]] bool configure(const FlatConfig& config) noexcept;
    [[nodiscard]] bool broken() const noexcept { return broken_; }

    // --- the loop ---
    [[nodiscard]] int wait_fd() const noexcept { return delivery_->wait_fd(); }
    [[nodiscard]] long timeout_ms() const noexcept { return delivery_->timeout_ms(); }
    [[nodiscard]] bool step(core::Micros steady) noexcept;
    [[nodiscard]] bool start(core::Micros steady) noexcept;
    [[nodiscard]] bool has_target() const noexcept { return delivery_->has_target(); }
    [[nodiscard]] std::size_t in_flight() const noexcept { return delivery_->in_flight(); }
    [[nodiscard]] std::uint32_t failures_in_a_row() const noexcept {
        return delivery_->failures_in_a_row();
    }

    // --- what to read ---
    [[nodiscard]] bool announced(std::uint32_t tag, std::int64_t lo, std::int64_t hi) noexcept;
    [[nodiscard]] bool rescan() noexcept;
    [[nodiscard]] bool discovered(FlatText lane) noexcept;
    [[nodiscard]] bool waits_until(FlatText lane, core::Micros at) noexcept;
    // Fills reads() with the lanes that want reading and have room; `factor` scales the limits. How
    // many.
    std::size_t plan_ready(std::size_t factor) noexcept;
    std::size_t plan_due(core::Micros now, std::size_t factor) noexcept;
    [[nodiscard]] const LaneRead& read(std::size_t index) const noexcept { return reads_[index]; }
    void ready_read_to(std::size_t index, std::int64_t seq) noexcept;
    void ready_read_whole(std::size_t index, bool has_last, std::int64_t last) noexcept;
    void due_read(std::size_t index, bool has_next, core::Micros next) noexcept;
    // Whether ready rows of the lane are still unread, and after which seq they may lie.
    [[nodiscard]] bool unread_after(std::string_view lane, std::int64_t* seq) const noexcept;
    [[nodiscard]] bool wants_ready() const noexcept;
    [[nodiscard]] bool wants_due(core::Micros now) const noexcept;
    // The next retry of any lane; false when there is none.
    [[nodiscard]] bool next_due(core::Micros* at) const noexcept;
    void claim_ended() noexcept { delivery_->dispatcher().claim_ended(); }

    // --- rows ---
    // core::Admission::full when memory is out.
    [[nodiscard]] core::Admission examine(const FlatRow& row, core::Source source) noexcept;
    [[nodiscard]] bool byte_room(FlatText lane, std::size_t bytes) noexcept;
    // The event under construction.
    [[nodiscard]] bool begin(const FlatRow& row) noexcept;
    [[nodiscard]] bool add_header(FlatText name, FlatText value) noexcept;
    [[nodiscard]] bool headers_invalid(const char* why) noexcept;
    void mark_replay() noexcept { event_.replay = true; }
    [[nodiscard]] bool unreadable(const char* why) noexcept;
    [[nodiscard]] bool admit(FlatText payload, core::Source source) noexcept;
    [[nodiscard]] bool parked(const FlatRow& row) noexcept;
    [[nodiscard]] bool hold(FlatText type, FlatText id) noexcept;
    [[nodiscard]] bool release_holds() noexcept;
    [[nodiscard]] bool orphaned(FlatText type, FlatText id) noexcept;

    // --- followers and parking ---
    std::size_t take_followers_wanted(std::size_t most) noexcept;
    [[nodiscard]] const core::Dispatcher::AggregateName& follower(std::size_t i) const noexcept {
        return followers_[i];
    }
    void followers_read_all(std::size_t index) noexcept;
    void followers_read_some(std::size_t index) noexcept;
    void followers_done() noexcept { followers_.clear(); }
    void followers_not_read(std::size_t index) noexcept;
    // Those taken but not read, when a claim failed, are wanted again.
    void abandon_followers() noexcept;
    [[nodiscard]] bool wants_followers() const noexcept;
    // Rows to park, until parking_done().
    std::size_t take_parking() noexcept;
    [[nodiscard]] const core::Dispatcher::Parking& parking(std::size_t i) const noexcept {
        return parking_[i];
    }
    void parking_done() noexcept { parking_.clear(); }
    [[nodiscard]] bool wants_parking() const noexcept;

    // --- results ---
    [[nodiscard]] bool has_results(core::Micros steady) const noexcept {
        return delivery_->has_results(steady);
    }
    [[nodiscard]] bool next_deferred(core::Micros* at) const noexcept;
    [[nodiscard]] std::size_t unrecorded() const noexcept { return delivery_->unrecorded(); }
    std::size_t take_batch(std::size_t most, core::Micros steady) noexcept;
    [[nodiscard]] net::Result& result(std::size_t index) noexcept {
        return delivery_->batch(index);
    }
    // True when rows have to be read again.
    void settle(std::size_t index, core::Settled how) noexcept;
    void defer(std::size_t index, core::Micros steady) noexcept;
    void batch_done() noexcept { delivery_->batch_done(); }

    // --- buckets ---
    [[nodiscard]] bool set_buckets(core::BucketMask mine) noexcept;
    [[nodiscard]] core::BucketMask buckets() const noexcept;
    [[nodiscard]] core::BucketMask busy_buckets() const noexcept;

  private:
    Bridge() = default;
    template <class Work>
    bool run(Work&& work) const noexcept {
        const bool ran = guarded(std::forward<Work>(work));
        broken_ = broken_ || !ran;
        return ran;
    }
    std::unique_ptr<net::Delivery> delivery_;
    core::Event event_;
    std::vector<LaneRead> reads_;
    std::vector<core::Dispatcher::AggregateName> followers_;
    std::vector<core::Dispatcher::Parking> parking_;
    mutable bool broken_ = false;
};

} // namespace outbox::pg
