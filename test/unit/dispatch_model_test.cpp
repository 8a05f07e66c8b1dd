// Accidents with order and loss that only a rare interleaving shows: thousands of random schedules
// of commits, claims, answers, crashes, locks, hand edits and hand-overs, against a model of the
// table. The claims are those of src/pg/store.cpp in small.
#include "core/dispatch.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <random>
#include <sstream>

namespace outbox::core {
namespace {

constexpr int kSchedules = 1200;
constexpr int kActions = 160;
constexpr std::int32_t kMaxAttempts = 4;
constexpr Micros kPollInterval = 100 * kMillisecond;
constexpr Micros kNoPolls = std::numeric_limits<Micros>::max() / 2;

enum class State : std::uint8_t { ready, retry, parked, delivered, dead, discarded };

struct Row {
    Uuid id;
    std::int64_t seq = 0;
    std::string type;
    std::string aggregate;
    std::size_t bytes = 0;
    State state = State::ready;
    Micros retry_at = 0; // State::retry
    std::int32_t attempts = 0;
    std::uint64_t edits = 0; // by hand; a failure is recorded only if none came between
    bool locked = false;     // by somebody else's transaction
    bool late = false;       // committed or revived after a later one: order does not bind it
    int parks = 0;
    int may_park = 1;

    [[nodiscard]] bool waiting() const { return state == State::retry || state == State::parked; }
    [[nodiscard]] bool pending() const { return state == State::ready || waiting(); }
};

struct Announcement {
    std::uint32_t tag = 0;
    std::int64_t lo = 0;
    std::int64_t hi = 0;
};

// What all workers share: the table, the ring of announcements and the map of buckets.
struct Database {
    std::map<std::int64_t, Row> rows; // committed ones, by seq
    std::map<Uuid, std::int64_t> seq_of;
    std::vector<Announcement> ring;
    std::array<unsigned, kBuckets> owner{};
    unsigned workers = 1;
    Micros now = kHour;
    Micros poll_interval = kPollInterval;
    std::ostream* history = nullptr; // told of every step, when somebody wants to know

    void tell(const char* what, const Row& row) const {
        if (history != nullptr) {
            *history << what << ' ' << row.type << '/' << row.aggregate << ' ' << row.seq << '\n';
        }
    }

    Row& row(const Uuid& id) { return rows.at(seq_of.at(id)); }

    // The first row of the aggregate below `seq` that satisfies the predicate.
    template <class Predicate>
    const Row* first_below(const Row& of, std::int64_t seq, Predicate predicate) const {
        for (const auto& [at, row] : rows) {
            if (at >= seq) {
                break;
            }
            if (row.type == of.type && row.aggregate == of.aggregate && predicate(row)) {
                return &row;
            }
        }
        return nullptr;
    }
};

using Random = std::mt19937;

int pick(Random& random, int from, int to) {
    return std::uniform_int_distribution<int>{from, to}(random);
}

bool chance(Random& random, int percent) {
    return pick(random, 1, 100) <= percent;
}

struct Sent {
    Uuid id;
    std::int32_t attempts = 0;
    std::uint64_t edits = 0;
    State claimed_state = State::ready;
};

struct Answered {
    Sent sent;
    bool success = true;
};

// One worker process: dispatcher, scan, and what the loop around them does.
class Worker {
  public:
    Worker(Database& database, Random& random, unsigned ordinal, const DispatchLimits& limits)
        : database_(database), random_(random), ordinal_(ordinal), limits_(limits),
          dispatcher_(limits), ring_tail_(database.ring.size()) {
        look_at_everything();
        next_poll_ = database_.now + database_.poll_interval;
    }

    [[nodiscard]] bool retired() const { return retired_; }
    [[nodiscard]] const std::map<Uuid, Sent>& requests() const { return requests_; }
    Dispatcher& dispatcher() { return dispatcher_; }

    void look_around() {
        sync_buckets();
        read_ring();
        if (database_.now >= next_poll_) {
            next_poll_ = database_.now + database_.poll_interval;
            look_at_everything();
        }
    }

    void answer(const Uuid& id, bool success) {
        const auto node = requests_.extract(id);
        dispatcher_.answered(id);
        results_.push_back({node.mapped(), success});
    }

    void turn(bool can_record) {
        std::vector<std::pair<Uuid, Settled>> settled;
        if (can_record) {
            settled = record();
        }
        park_all();
        if (wants_claim()) {
            claim();
            park_all();
        }
        for (const auto& [id, how] : settled) {
            dispatcher_.settled(id, how);
            for (const Dispatcher::Reread& reread : dispatcher_.take_rereads()) {
                scan_.again(reread.lane, reread.range);
                scan_.waits_until(reread.lane, std::numeric_limits<Micros>::min());
            }
        }
    }

    // Starts one event, if any may start.
    const Event* start() {
        const Event* event = dispatcher_.next();
        if (event != nullptr) {
            requests_[event->id] = claimed_.at(event->id);
            dispatcher_.release_payload(event->id);
        }
        return event;
    }

  private:
    struct Read {
        std::string lane;
        SeqRange range;
        std::size_t limit = 0;
        std::size_t rows = 0;
        std::int64_t last = 0;
        bool stopped = false;
        bool admitted = false;
        bool no_room = false; // stopped at a row that has to be read again
    };

    void look_at_everything() {
        scan_.rescan();
        dispatcher_.release_holds();
        discover_ = true;
        walk_again_ = walking_;
        walking_ = true;
    }

    void sync_buckets() {
        BucketMask mine = 0;
        BucketMask leaving = 0;
        for (unsigned bucket = 0; bucket < kBuckets; ++bucket) {
            if (database_.owner[bucket] == ordinal_) {
                const bool stays = bucket % database_.workers == ordinal_;
                (stays ? mine : leaving) |= bucket_bit(bucket);
            }
        }
        const BucketMask gained = mine & ~dispatcher_.buckets();
        if (mine != dispatcher_.buckets()) {
            dispatcher_.set_buckets(mine);
        }
        if (gained != 0) {
            look_at_everything();
        }
        const BucketMask free = leaving & ~dispatcher_.busy_buckets();
        for (unsigned bucket = 0; bucket < kBuckets; ++bucket) {
            if ((free & bucket_bit(bucket)) != 0) {
                database_.owner[bucket] = bucket % database_.workers;
            }
        }
        retired_ = mine == 0 && leaving == free && ordinal_ >= database_.workers;
    }

    void read_ring() {
        for (; ring_tail_ < database_.ring.size(); ++ring_tail_) {
            const Announcement& entry = database_.ring[ring_tail_];
            if (!scan_.announced(entry.tag, entry.lo, entry.hi)) {
                discover_ = true;
            }
        }
    }

    // --- recording ---

    std::vector<std::pair<Uuid, Settled>> record() {
        std::vector<std::pair<Uuid, Settled>> settled;
        std::vector<Answered> deferred;
        for (const Answered& result : results_) {
            Row& row = database_.row(result.sent.id);
            database_.tell(result.success ? "record success of" : "record failure of", row);
            if (!row.pending()) {
                settled.emplace_back(row.id, Settled::closed);
            } else if (row.locked) {
                deferred.push_back(result);
            } else if (result.success) {
                row.state = State::delivered;
                settled.emplace_back(row.id, Settled::closed);
            } else if (row.edits != result.sent.edits || row.state != result.sent.claimed_state) {
                settled.emplace_back(row.id, Settled::changed);
            } else {
                settled.emplace_back(row.id, record_failure(row));
            }
        }
        results_ = std::move(deferred);
        return settled;
    }

    Settled record_failure(Row& row) {
        ++row.may_park;
        if (++row.attempts >= kMaxAttempts) {
            row.state = State::dead;
            return Settled::closed;
        }
        row.state = State::retry;
        row.retry_at = database_.now + pick(random_, 1, 3) * 10 * kMillisecond;
        scan_.waits_until(row.type, row.retry_at);
        return Settled::waiting;
    }

    void park_all() {
        for (const Dispatcher::Parking& parking : dispatcher_.take_parking()) {
            parking_.push_back(parking.row.block);
        }
        for (const std::int64_t seq : parking_) {
            Row& row = database_.rows.at(seq);
            park(row);
            if (row.locked && row.pending()) { // not parked: its aggregate waits with it
                dispatcher_.hold(row.type, row.aggregate);
            }
        }
        parking_.clear();
    }

    void park(Row& row) {
        if (!row.locked && (row.state == State::ready || row.state == State::retry)) {
            database_.tell("park", row);
            row.state = State::parked;
            ++row.parks;
        }
    }

    // --- reading ---

    bool wants_claim() {
        if (discover_ || walking_ || dispatcher_.wants_followers()) {
            return true;
        }
        const auto has_room = [this](const std::string& lane) {
            return dispatcher_.row_room(lane) > 0;
        };
        return std::ranges::any_of(scan_.lanes_wanted(), has_room) ||
               std::ranges::any_of(scan_.lanes_due(database_.now), has_room);
    }

    void claim() {
        if (discover_) {
            for (const auto& [seq, row] : database_.rows) {
                if (row.pending()) {
                    scan_.discovered(row.type);
                }
            }
            discover_ = false;
        }
        walk_orphans();
        claim_followers();
        claim_due();
        claim_ready();
        dispatcher_.claim_ended();
    }

    // A few aggregates a step: those whose first waiting row is parked.
    void walk_orphans() {
        if (!walking_) {
            return;
        }
        std::map<std::pair<std::string, std::string>, State> first;
        for (const auto& [seq, row] : database_.rows) {
            if (row.waiting()) {
                first.try_emplace({row.type, row.aggregate}, row.state);
            }
        }
        for (int steps = pick(random_, 1, 4); steps > 0; --steps) {
            const auto it = first.upper_bound(walked_);
            if (it == first.end()) {
                walking_ = walk_again_; // what was asked for halfway
                walk_again_ = false;
                walked_ = {};
                return;
            }
            if (it->second == State::parked) {
                dispatcher_.orphaned(it->first.first, it->first.second);
            }
            walked_ = it->first;
        }
    }

    void take_row(Read& read, const Row& row, Source source, std::vector<const Row*>& admitted) {
        std::optional<std::int64_t> earlier;
        if (source != Source::parked) {
            if (const Row* first = database_.first_below(
                    row, row.seq, [](const Row& other) { return other.waiting(); })) {
                earlier = first->seq;
            }
        }
        switch (dispatcher_.examine(row.id, row.type, row.aggregate, source, earlier)) {
        case Admission::queued:
            if (!dispatcher_.byte_room(row.type, row.bytes)) {
                read.stopped = true;
                read.no_room = true;
                return;
            }
            admit(row, source);
            admitted.push_back(&row);
            read.admitted = true;
            break;
        case Admission::full:
            read.stopped = true;
            read.no_room = true;
            return;
        case Admission::park:
            dispatcher_.parked(row.type, row.aggregate);
            parking_.push_back(row.seq);
            break;
        case Admission::known:
        case Admission::foreign:
        case Admission::held:
            break;
        }
        read.last = row.seq;
        ++read.rows;
    }

    void admit(const Row& row, Source source) {
        database_.tell(source == Source::ready ? "claim ready"
                       : source == Source::due ? "claim due"
                                               : "claim parked",
                       row);
        Event event;
        event.id = row.id;
        event.seq = row.seq;
        event.aggregate_type = row.type;
        event.aggregate_id = row.aggregate;
        event.attempts = row.attempts;
        event.row.block = static_cast<std::uint32_t>(row.seq); // where it is
        event.payload.assign(row.bytes, 'x');
        claimed_[row.id] = {row.id, row.attempts, row.edits, row.state};
        dispatcher_.admit(std::move(event), source);
    }

    void hold_locked(const std::vector<const Row*>& admitted) {
        for (const Row* row : admitted) {
            if (row->locked) {
                database_.tell("hold", *row);
                dispatcher_.hold(row->type, row->aggregate);
            }
        }
    }

    void claim_followers() {
        std::vector<const Row*> admitted;
        for (const Dispatcher::AggregateName& name :
             dispatcher_.take_followers_wanted(static_cast<std::size_t>(pick(random_, 1, 3)))) {
            constexpr std::size_t kLimit = kMaxFollowers + 1;
            Read read;
            std::size_t rows = 0;
            for (const auto& [seq, row] : database_.rows) {
                if (row.type != name.aggregate_type || row.aggregate != name.aggregate_id ||
                    !row.waiting()) {
                    continue;
                }
                if (read.stopped) {
                    break;
                }
                // Ready rows below it may not have been read yet, after a restart say.
                const auto unread = scan_.wanted(row.type);
                read.no_room = unread && seq > unread->after;
                if (row.state != State::parked || ++rows > kLimit || read.no_room) {
                    read.stopped = true;
                } else {
                    take_row(read, row, Source::parked, admitted);
                }
            }
            if (!read.stopped && read.rows < kLimit) {
                dispatcher_.followers_read_all(name);
            } else if (read.no_room && !read.admitted) {
                dispatcher_.followers_not_read(name);
            } else {
                dispatcher_.followers_read_some(name);
            }
        }
        hold_locked(admitted);
    }

    void claim_due() {
        std::vector<Read> reads;
        for (const std::string& lane : scan_.lanes_due(database_.now)) {
            if (const std::size_t room = dispatcher_.row_room(lane); room > 0) {
                reads.push_back({lane, {}, room * database_.workers + dispatcher_.held_events()});
            }
        }
        std::vector<const Row*> admitted;
        for (Read& read : reads) {
            std::map<std::pair<Micros, std::int64_t>, const Row*> due;
            std::optional<Micros> next;
            for (const auto& [seq, row] : database_.rows) {
                if (row.type != read.lane || row.state != State::retry) {
                    continue;
                }
                if (row.retry_at <= database_.now) {
                    due[{row.retry_at, seq}] = &row;
                } else {
                    next = std::min(next.value_or(row.retry_at), row.retry_at);
                }
            }
            for (const auto& [key, row] : due) {
                if (read.stopped || read.rows >= read.limit) {
                    break;
                }
                take_row(read, *row, Source::due, admitted);
            }
            const bool more = read.stopped || read.rows >= read.limit;
            scan_.due_read(read.lane, more ? database_.now + 20 * kMillisecond : next);
        }
        hold_locked(admitted);
    }

    void claim_ready() {
        std::vector<Read> reads;
        for (const std::string& lane : scan_.lanes_wanted()) {
            const std::size_t room = dispatcher_.row_room(lane);
            const auto range = scan_.wanted(lane);
            if (room > 0 && range) {
                reads.push_back({lane, *range, room * database_.workers});
            }
        }
        std::vector<const Row*> admitted;
        for (Read& read : reads) {
            std::size_t seen = 0;
            for (const auto& [seq, row] : database_.rows) {
                if (row.type != read.lane || row.state != State::ready || seq <= read.range.after ||
                    seq > read.range.upto) {
                    continue;
                }
                if (read.stopped || ++seen > read.limit) {
                    break;
                }
                take_row(read, row, Source::ready, admitted);
            }
        }
        hold_locked(admitted);
        for (const Read& read : reads) {
            if (!read.stopped && read.rows < read.limit) {
                scan_.read_whole(read.lane, read.range,
                                 read.rows > 0 ? std::optional{read.last} : std::nullopt);
            } else if (read.rows > 0) {
                scan_.read_to(read.lane, read.range, read.last);
            }
        }
    }

    Database& database_;
    Random& random_;
    unsigned ordinal_;
    DispatchLimits limits_;
    Dispatcher dispatcher_;
    Scan scan_;
    std::size_t ring_tail_;
    bool discover_ = true;
    bool walking_ = false;
    bool walk_again_ = false;
    bool retired_ = false;
    std::pair<std::string, std::string> walked_;
    Micros next_poll_ = 0;
    std::map<Uuid, Sent> claimed_;
    std::map<Uuid, Sent> requests_;
    std::vector<Answered> results_;
    std::vector<std::int64_t> parking_;
};

// One random schedule.
class Schedule {
  public:
    // Orderly: each commit is announced, writers lock their aggregate, nobody touches rows, and
    // there is no safety poll.
    Schedule(bool orderly, std::uint32_t seed, std::ostream* history = nullptr)
        : orderly_(orderly), random_(seed) {
        database_.history = history;
        database_.poll_interval = orderly ? kNoPolls : kPollInterval;
        limits_.max_in_flight = static_cast<std::size_t>(pick(random_, 1, 6));
        limits_.max_rows =
            static_cast<std::size_t>(chance(random_, 50) ? 100 : pick(random_, 1, 30));
        limits_.max_bytes = 100;
        limits_.ordering = chance(random_, 10) ? Ordering::none : Ordering::aggregate;
        lanes_ = pick(random_, 1, 3);
        aggregates_ = chance(random_, 30) ? 1 : pick(random_, 2, 5);
        writers_lock_ = orderly || chance(random_, 60);
        hand_edits_ = !orderly && chance(random_, 40);
        database_.workers = static_cast<unsigned>(pick(random_, 1, 2));
    }

    // What went wrong; empty when nothing did.
    std::string run() {
        for (int action = 0; action < kActions && fault_.empty(); ++action) {
            act(pick(random_, 1, 100));
        }
        finish();
        return fault_;
    }

  private:
    struct Transaction {
        std::vector<Row> rows;
    };

    void fault(const std::string& what, const Row& row) {
        if (fault_.empty()) {
            std::ostringstream text;
            text << what << ": seq " << row.seq << " of " << row.type << '/' << row.aggregate;
            fault_ = text.str();
        }
    }

    // --- what happens ---

    void act(int dice) {
        if (dice <= 25) {
            insert();
        } else if (dice <= 35) {
            commit();
        } else if (dice <= 75) {
            const bool can_record = chance(random_, 90); // one draw a statement: seeds are for ever
            work(static_cast<unsigned>(pick(random_, 0, 1)), can_record);
        } else if (dice <= 90) {
            answer(chance(random_, 70));
        } else if (dice <= 94) {
            database_.now += pick(random_, 1, 50) * kMillisecond;
        } else if (dice == 95) {
            crash(static_cast<unsigned>(pick(random_, 0, 1)));
        } else if (dice == 96) {
            database_.workers = 3 - database_.workers;
            database_.tell("change of workers", {});
        } else if (hand_edits_) {
            by_hand();
        }
    }

    // Inserts some rows in a transaction, committed at once or left open.
    void insert() {
        Transaction transaction;
        for (int rows = pick(random_, 1, 6); rows > 0; --rows) {
            Row row;
            row.seq = ++last_seq_;
            for (int byte = 0; byte < 4; ++byte) {
                row.id.bytes[static_cast<std::size_t>(byte)] =
                    static_cast<std::uint8_t>(last_seq_ >> (8 * byte));
            }
            row.type = "lane" + std::to_string(pick(random_, 1, lanes_));
            row.aggregate = std::to_string(pick(random_, 1, aggregates_));
            row.bytes = static_cast<std::size_t>(chance(random_, 5) ? pick(random_, 60, 150) : 1);
            if (!(writers_lock_ && is_open(row))) {
                transaction.rows.push_back(std::move(row));
            }
        }
        open_.push_back(std::move(transaction));
        if (chance(random_, 60)) {
            commit_at(open_.size() - 1);
        }
    }

    // Whether an open transaction has rows of that aggregate.
    [[nodiscard]] bool is_open(const Row& of) const {
        return std::ranges::any_of(open_, [&](const Transaction& transaction) {
            return std::ranges::any_of(transaction.rows, [&](const Row& row) {
                return row.type == of.type && row.aggregate == of.aggregate;
            });
        });
    }

    void commit() {
        if (!open_.empty()) {
            commit_at(
                static_cast<std::size_t>(pick(random_, 0, static_cast<int>(open_.size()) - 1)));
        }
    }

    void commit_at(std::size_t index) {
        std::map<std::uint32_t, std::pair<std::int64_t, std::int64_t>> ranges;
        Transaction transaction = std::move(open_[index]);
        open_.erase(open_.begin() + static_cast<std::ptrdiff_t>(index));
        const bool announced = orderly_ || chance(random_, 97); // else as COMMIT PREPARED
        for (Row& row : transaction.rows) {
            row.late = !announced;
            for (const auto& [seq, other] : database_.rows) {
                row.late = row.late || (seq > row.seq && other.type == row.type &&
                                        other.aggregate == row.aggregate);
            }
            auto& range = ranges.try_emplace(lane_tag(row.type), row.seq, row.seq).first->second;
            range = {std::min(range.first, row.seq), std::max(range.second, row.seq)};
        }
        for (Row& row : transaction.rows) {
            database_.tell(announced ? "commit" : "commit unannounced", row);
            database_.seq_of[row.id] = row.seq;
            database_.rows.emplace(row.seq, std::move(row));
        }
        if (announced) {
            for (const auto& [tag, range] : ranges) {
                database_.ring.push_back({tag, range.first, range.second});
            }
        }
    }

    void work(unsigned ordinal, bool can_record) {
        std::unique_ptr<Worker>& worker = workers_[ordinal];
        if (worker == nullptr) {
            if (ordinal >= database_.workers &&
                std::ranges::find(database_.owner, ordinal) == database_.owner.end()) {
                return;
            }
            worker = std::make_unique<Worker>(database_, random_, ordinal, limits_);
        }
        worker->look_around();
        if (worker->retired()) {
            worker.reset();
            return;
        }
        if (chance(random_, 90)) {
            worker->turn(can_record);
        }
        while (const Event* event = worker->start()) {
            check_start(ordinal, *event);
        }
        check_numbers(*worker);
    }

    void answer(bool success) {
        std::vector<std::pair<Worker*, Uuid>> all;
        for (const auto& worker : workers_) {
            if (worker != nullptr) {
                for (const auto& [id, sent] : worker->requests()) {
                    all.emplace_back(worker.get(), id);
                }
            }
        }
        if (!all.empty()) {
            const auto& [worker, id] =
                all[static_cast<std::size_t>(pick(random_, 0, static_cast<int>(all.size()) - 1))];
            worker->answer(id, success);
        }
    }

    void crash(unsigned ordinal) {
        if (workers_[ordinal] != nullptr) {
            database_.tell("crash of the worker", {});
            workers_[ordinal] = std::make_unique<Worker>(database_, random_, ordinal, limits_);
        }
    }

    // Somebody locks, unlocks, hurries, revives, replays or discards a row.
    void by_hand() {
        if (database_.rows.empty()) {
            return;
        }
        auto it = database_.rows.begin();
        std::advance(it, pick(random_, 0, static_cast<int>(database_.rows.size()) - 1));
        Row& row = it->second;
        database_.tell("touch by hand", row);
        if (chance(random_, 50)) {
            row.locked = !row.locked;
        } else if (!row.locked && row.state == State::retry && chance(random_, 60)) {
            row.state = State::ready;
            row.late = true;
            ++row.edits;
            ++row.may_park;
        } else if (!row.locked && (row.state == State::dead || row.state == State::delivered)) {
            row.state = State::ready;
            row.attempts = 0;
            row.late = true;
            ++row.edits;
            ++row.may_park;
        } else if (!row.locked && row.pending() && chance(random_, 30)) {
            row.state = State::discarded;
            ++row.edits;
        }
    }

    // Everything heals: all that is left must go out.
    void finish() {
        while (!open_.empty()) {
            commit();
        }
        for (auto& [seq, row] : database_.rows) {
            row.locked = false;
        }
        for (int round = 0; round < 1000 && fault_.empty(); ++round) {
            for (const unsigned ordinal : {0U, 1U}) {
                work(ordinal, true);
            }
            for (int answers = 0; answers < 12; ++answers) {
                answer(chance(random_, 95));
            }
            database_.now += 10 * kMillisecond;
            if (done()) {
                return;
            }
        }
        for (const auto& [seq, row] : database_.rows) {
            if (row.pending()) {
                fault("stuck in state " + std::to_string(static_cast<int>(row.state)), row);
            }
        }
    }

    [[nodiscard]] bool done() const {
        return std::ranges::none_of(database_.rows,
                                    [](const auto& entry) { return entry.second.pending(); });
    }

    // --- what must hold ---

    void check_start(unsigned ordinal, const Event& event) {
        const Row& row = database_.row(event.id);
        database_.tell("send", row);
        if (database_.owner[bucket_of(row.type, row.aggregate)] != ordinal) {
            fault("sent by a worker that does not own its bucket", row);
        }
        if (limits_.ordering == Ordering::none) {
            return;
        }
        for (const auto& worker : workers_) {
            if (worker == nullptr) {
                continue;
            }
            for (const auto& [id, sent] : worker->requests()) {
                const Row& other = database_.row(id);
                if (id != row.id && other.type == row.type && other.aggregate == row.aggregate) {
                    fault("sent while another of its aggregate is in flight", row);
                }
            }
        }
        const auto blocks = [](const Row& other) { return other.pending() && !other.late; };
        if (row.pending() && database_.first_below(row, row.seq, blocks) != nullptr) {
            fault("sent before " + std::to_string(database_.first_below(row, row.seq, blocks)->seq),
                  row);
        }
    }

    void check_numbers(Worker& worker) {
        const Dispatcher& dispatcher = worker.dispatcher();
        if (fault_.empty() && dispatcher.in_flight() > limits_.max_in_flight) {
            fault_ = "too many requests";
        }
        // A lane whose event is waited for gets a row more.
        if (fault_.empty() && dispatcher.queued() > limits_.max_rows + 1) {
            fault_ = "too many rows";
        }
        for (const auto& [seq, row] : database_.rows) {
            if (row.parks > row.may_park) {
                fault("parked again while it waited", row);
            }
        }
    }

    bool orderly_;
    Random random_;
    Database database_;
    DispatchLimits limits_;
    int lanes_ = 1;
    int aggregates_ = 1;
    bool writers_lock_ = true;
    bool hand_edits_ = false;
    std::int64_t last_seq_ = 0;
    std::vector<Transaction> open_;
    std::array<std::unique_ptr<Worker>, 2> workers_;
    std::string fault_;
};

void run_schedules(bool orderly) {
    int faults = 0;
    for (std::uint32_t seed = 1; seed <= kSchedules && faults < 3; ++seed) {
        if (const std::string fault = Schedule{orderly, seed}.run(); !fault.empty()) {
            std::ostringstream history;
            (void)Schedule{orderly, seed, &history}.run();
            ADD_FAILURE() << "seed " << seed << ": " << fault << "\n" << history.str();
            ++faults;
        }
    }
}

TEST(DispatchModel, EveryScheduleKeepsOrderAndLosesNothing) {
    run_schedules(false);
}

TEST(DispatchModel, NothingWaitsForTheSafetyPoll) {
    run_schedules(true);
}

} // namespace
} // namespace outbox::core
