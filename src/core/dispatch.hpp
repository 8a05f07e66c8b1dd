// What may be sent now: a state machine over claimed events, fed with claims, answers and recorded
// results. Keeps order per aggregate (G4), shares slots and memory among lanes (G5) and bounds both
// (G10). No clock, no I/O, no table: what the table holds beyond memory is known only as "this
// aggregate has waiting rows".
//
//   admit --> queued --next()--> in flight --answered()--> settling --settled()--> gone
//
// An aggregate has at most one event in flight or settling (Ordering::aggregate); the next one
// starts when the result of the one before is recorded. Not thread-safe.
#pragma once

#include <deque>
#include <memory>
#include <unordered_map>

#include "core/bucket.hpp"
#include "core/scan.hpp"
#include "core/types.hpp"

namespace outbox::core {

enum class Ordering : std::uint8_t { aggregate, none };

struct DispatchLimits {
    std::size_t max_in_flight = 128;    // requests at once, > 0
    std::size_t max_bytes = 64U << 20U; // payload bytes held, > 0
    std::size_t max_rows = 400;         // events held that were not started, > 0
    Ordering ordering = Ordering::aggregate;
};

// Events of one aggregate held in memory; more are parked in the table.
constexpr std::size_t kMaxFollowers = 16;

// Where a claimed row was found.
enum class Source : std::uint8_t {
    ready,  // retry_after is null
    due,    // retry_after has passed
    parked, // retry_after is -infinity, and nothing earlier of its aggregate waits outside memory
};

enum class Admission : std::uint8_t {
    queued,
    known,   // held already
    foreign, // its bucket is another worker's, or about to be
    held,    // its aggregate is held back; it is read again later
    park,    // an earlier event of its aggregate waits: write retry_after = -infinity
    full,    // no room now: read it again later
};

// What became of an event whose answer was handled.
enum class Settled : std::uint8_t {
    closed,  // delivered, dead or gone: the next one may go
    waiting, // retries later: its followers wait behind it
    changed, // somebody changed the row meanwhile: it has to be read again before its followers
};

class Dispatcher {
  public:
    explicit Dispatcher(const DispatchLimits& limits) : limits_(limits) {}

    // In force for what is admitted or started from now on.
    void set_limits(const DispatchLimits& limits) noexcept { limits_ = limits; }

    // --- room ---
    // Rows that a claim may still bring into this lane. Lanes share by "less than what is free":
    // one lane alone gets half of all, two a third each, so that a stuck lane never takes the room
    // of others.
    [[nodiscard]] std::size_t row_room(std::string_view lane) const noexcept;
    // Whether an event of that many payload bytes may be brought into memory now; lanes share bytes
    // as they share rows. When one is refused whose lane holds nothing, or that is larger than any
    // lane's share, nothing else is admitted until it fits or memory is empty: so the largest event
    // goes, if need be alone.
    [[nodiscard]] bool byte_room(std::string_view lane, std::size_t bytes);

    // --- feeding ---
    // What admit() would say, before the payload is read. `earlier` is the lowest seq of the
    // aggregate's waiting rows below this event's seq, if the claim saw one.
    [[nodiscard]] Admission examine(const Uuid& id, std::string_view aggregate_type,
                                    std::string_view aggregate_id, Source source,
                                    std::optional<std::int64_t> earlier);
    // Takes an event that examine() found to be queued.
    void admit(Event&& event, Source source);
    // A claim has ended: what it did not bring is not there.
    void claim_ended() noexcept;
    // A row of the aggregate was parked: if memory holds the aggregate, it fetches its followers
    // later.
    void parked(std::string_view aggregate_type, std::string_view aggregate_id);
    // The first waiting row of the aggregate is parked; if nothing of it is in memory, its
    // followers may go now.
    void orphaned(std::string_view aggregate_type, std::string_view aggregate_id);
    // A row of the aggregate cannot be taken now (locked, unreadable): nothing of it starts until
    // release_holds().
    void hold(std::string_view aggregate_type, std::string_view aggregate_id);
    void release_holds();

    // --- starting ---
    // The next event to send, now in flight; null when none may start. Valid until settled().
    [[nodiscard]] const Event* next();

    // --- finishing ---
    // The request has ended; its slot is free, its aggregate still blocked.
    void answered(const Uuid& id);
    // The result is recorded, or there is nothing to record. Unknown ids are ignored.
    void settled(const Uuid& id, Settled how);
    // The body is with the engine: the payload need not be held twice. Its bytes count until
    // settled().
    void release_payload(const Uuid& id) noexcept;

    struct Parking {
        RowVersion row;
        std::string aggregate_type;
        std::string aggregate_id;
    };
    // Events dropped from memory that must be parked in the table, since their head waits now.
    [[nodiscard]] std::vector<Parking> take_parking() noexcept;
    [[nodiscard]] bool wants_parking() const noexcept { return !parking_.empty(); }

    struct Reread {
        std::string lane;
        SeqRange range;
    };
    // Ranges whose events were dropped from memory and have to be read again.
    [[nodiscard]] std::vector<Reread> take_rereads() noexcept;

    struct AggregateName {
        std::string aggregate_type;
        std::string aggregate_id;
    };
    // Up to `most` aggregates whose waiting rows may follow now; each is owed a followers_read().
    [[nodiscard]] std::vector<AggregateName> take_followers_wanted(std::size_t most);
    [[nodiscard]] bool wants_followers() const noexcept { return !followers_wanted_.empty(); }
    // All its parked rows were read and admitted.
    void followers_read_all(const AggregateName& name);
    // Some were; more may be parked.
    void followers_read_some(const AggregateName& name);
    // The read failed or found no room: they are wanted again.
    void followers_not_read(const AggregateName& name);

    // --- buckets ---
    // The buckets this worker may start events of. Queued events of others are dropped; those in
    // flight end here.
    void set_buckets(BucketMask mine);
    [[nodiscard]] BucketMask buckets() const noexcept { return mine_; }
    // Buckets with an event in flight or settling.
    [[nodiscard]] BucketMask busy_buckets() const noexcept;

    // --- numbers ---
    [[nodiscard]] std::size_t in_flight() const noexcept { return in_flight_; }
    [[nodiscard]] std::size_t queued() const noexcept { return queued_; }
    [[nodiscard]] std::size_t held_events() const noexcept { return items_.size(); }
    [[nodiscard]] std::size_t held_bytes() const noexcept { return bytes_; }

  private:
    struct Lane;
    struct Aggregate;
    enum class Stage : std::uint8_t { queued, in_flight, settling };
    struct Item {
        Event event;
        Aggregate* aggregate = nullptr;
        std::size_t bytes = 0;
        Stage stage = Stage::queued;
        bool waited = false; // its row waits in the table, too
    };
    struct Aggregate {
        Lane* lane = nullptr;
        std::string id;
        unsigned bucket = 0;
        std::deque<Item*> queue;          // by seq
        std::vector<std::int64_t> active; // seqs in flight or settling
        bool waiting = false;             // rows wait in the table beyond memory
        bool held = false;
        bool wanted = false;   // in followers_wanted_
        bool runnable = false; // in lane->runnable
    };
    struct Lane {
        std::string name;
        std::deque<Aggregate*> runnable;
        std::size_t events = 0;
        std::size_t queued = 0;
        std::size_t in_flight = 0;
        std::size_t bytes = 0;
        std::size_t aggregates = 0;
        bool runnable_listed = false; // in runnable_
    };

    [[nodiscard]] static std::string key_of(std::string_view type, std::string_view id);
    [[nodiscard]] Aggregate* find_aggregate(std::string_view type, std::string_view id) const;
    [[nodiscard]] const Lane* find_lane(std::string_view name) const noexcept;
    Aggregate& aggregate_of(std::string_view type, std::string_view id);
    [[nodiscard]] bool may_start(const Aggregate& aggregate) const noexcept;
    void enlist(Aggregate& aggregate);
    void want_followers(Aggregate& aggregate);
    [[nodiscard]] static bool holds_seq(const Aggregate& aggregate, std::int64_t seq) noexcept;
    void drop_queue(Aggregate& aggregate);
    void drop_last(Aggregate& aggregate);
    void park_queue(Aggregate& aggregate, std::int64_t head);
    void forget(const Uuid& id);
    void forget_if_empty(Lane& lane);
    void forget_if_empty(Aggregate& aggregate);
    const Event* start_one(Lane& lane);

    DispatchLimits limits_;
    BucketMask mine_ = 0;
    std::unordered_map<Uuid, std::unique_ptr<Item>, UuidHash> items_;
    std::unordered_map<std::string, std::unique_ptr<Aggregate>> aggregates_;
    std::map<std::string, std::unique_ptr<Lane>, std::less<>> lanes_;
    std::deque<Lane*> runnable_; // lanes with an aggregate that may start, served in turn
    std::deque<AggregateName> followers_wanted_;
    std::vector<Parking> parking_;
    std::vector<Reread> rereads_;
    std::array<std::uint32_t, kBuckets> active_in_bucket_{};
    std::size_t queued_ = 0;
    std::size_t in_flight_ = 0;
    std::size_t bytes_ = 0;
    std::size_t holds_ = 0;
    std::string large_lane_; // whose event is waited for
    std::size_t large_bytes_ = 0;
    bool large_waits_ = false;
    bool draining_ = false;      // nothing else is admitted meanwhile
    bool large_refused_ = false; // it was met in the current claim, and did not fit
};

} // namespace outbox::core
