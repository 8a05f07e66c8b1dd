// A worker process: one turn after the other for one database (DESIGN 2.2). Holds the loop, the
// transactions and what a failed one means; SQL is in store.cpp, decisions about events are behind
// the bridge.
#include <ctime>

#include "pg/bridge.hpp"
#include "pg/encoding.hpp"
#include "pg/horizon.hpp"
#include "pg/log.hpp"
#include "pg/settings.hpp"
#include "pg/shared_state.hpp"
#include "pg/store.hpp"

#include <curl/curl.h>

extern "C" {
PGDLLEXPORT void outbox_worker_main(Datum argument);
}

namespace outbox::pg {

namespace {

using core::kMillisecond;
using core::kSecond;
using core::Micros;

constexpr std::size_t kMaxBatch = 1'000; // results recorded by one transaction
constexpr Micros kLockedRetry = 50 * kMillisecond;
constexpr Micros kNoRoomRetry = 20 * kMillisecond;
constexpr Micros kMaxTurnBackOff = 30 * kSecond;
constexpr int kMaxUnreadable = 50; // rows set aside in one turn
constexpr int kPurgeRows = 1'000;
constexpr std::uint64_t kPurgeSpan = 64 * kPlacesPerBlock;
constexpr Micros kPurgeLogPause = 30 * kSecond;
constexpr std::uint32_t kManyFailures = 5; // in a row: the endpoint as a whole

// Everything a worker knows. Plain data; what has destructors is behind the bridge.
struct Worker {
    WorkerSlot* slot;
    DatabaseSlot* database;
    int ordinal;
    Bridge* bridge;
    Table table;
    WaitEventSet* waits;
    std::uint64_t ring_tail;
    std::uint32_t extension_changes;
    core::BucketMask leaving; // buckets to give away when nothing of them is under way
    bool ring_waits;          // an announcement was being written when we looked
    bool discover;
    OrphanWalk orphans;
    Micros orphans_cost;
    Micros next_orphans;
    Micros next_poll;
    Micros next_turn;  // not before
    Micros next_claim; // not before, unless something changes: the last one found no room
    Micros turn_back_off;
    Micros cannot_record_until;
    Micros next_purge;
    Micros purge_cost;
    std::uint64_t purge_from; // a place in the table, see store.hpp
    std::uint64_t purge_span;
    Micros next_purge_log;
    Micros stop_deadline; // 0: not stopping
    WorkerExit stop_reason;
    bool stats_pending;
    char database_name[NAMEDATALEN];
    MemoryContext memory; // reset before each turn
    char error[512];      // of the last failed transaction
};

Worker self = {};

volatile sig_atomic_t stop_requested = 0;
volatile sig_atomic_t in_statement = 0;

// Ends the loop; a statement under way is cancelled, so that shutdown never waits for a user's
// trigger.
void on_sigterm([[maybe_unused]] SIGNAL_ARGS) {
    const int saved_errno = errno;
    stop_requested = 1;
    if (in_statement != 0) {
        QueryCancelPending = true;
        InterruptPending = true;
    }
    SetLatch(MyLatch);
    errno = saved_errno;
}

Micros steady_now() {
    timespec now = {};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<Micros>(now.tv_sec) * kSecond + now.tv_nsec / 1000;
}

// Milliseconds until a deadline of the steady clock.
long until(Micros deadline) {
    const Micros left = deadline - steady_now();
    return left <= 0 ? 0 : static_cast<long>((left + kMillisecond - 1) / kMillisecond);
}

// --- shared state ---

void set_last_error(const char* text) {
    SpinLockAcquire(&self.slot->error_lock);
    strlcpy(self.slot->last_error, text, sizeof(self.slot->last_error));
    SpinLockRelease(&self.slot->error_lock);
}

void set_trouble(Trouble trouble) {
    if (self.slot->trouble.load() != trouble) {
        self.slot->trouble_since.store(GetCurrentTimestamp());
        self.slot->trouble.store(trouble);
    }
}

void publish() {
    self.slot->in_flight.store(static_cast<std::uint32_t>(self.bridge->in_flight()));
    self.slot->unrecorded.store(static_cast<std::uint32_t>(self.bridge->unrecorded()));
    const Micros now = steady_now();
    if (now < self.cannot_record_until) {
        set_trouble(Trouble::cannot_record);
    } else if (self.turn_back_off > 0) {
        set_trouble(Trouble::turn_fails);
    } else if (!self.bridge->has_target()) {
        set_trouble(Trouble::no_endpoint);
    } else if (self.bridge->failures_in_a_row() >= kManyFailures) {
        set_trouble(Trouble::endpoint_fails);
    } else if (self.slot->trouble.load() != Trouble::table_locked) {
        set_trouble(Trouble::none);
    }
}

void leave_slot(int code, Datum /*argument*/) {
    if (code != 0 && self.slot->exit != WorkerExit::absent) {
        self.slot->exit = WorkerExit::failed;
    }
    self.slot->latch.store(nullptr);
    self.slot->buckets.store(0);
    self.slot->in_flight.store(0);
    self.slot->status.store(WorkerStatus::exited);
    wake_launcher();
}

[[noreturn]] void leave(WorkerExit reason) {
    self.slot->exit = reason;
    proc_exit(0);
}

// Takes the slot the launcher prepared, unless it gave up on us meanwhile.
void attach(int index) {
    self.slot = &shared->workers[index];
    std::uint32_t generation = 0;
    std::memcpy(&generation, MyBgworkerEntry->bgw_extra, sizeof(generation));
    LWLockAcquire(shared->lock, LW_EXCLUSIVE);
    const bool ours =
        self.slot->status.load() == WorkerStatus::starting && self.slot->generation == generation;
    if (ours) {
        self.slot->pid = MyProcPid;
        self.slot->status.store(WorkerStatus::running);
    }
    LWLockRelease(shared->lock);
    if (!ours) {
        proc_exit(0);
    }
    before_shmem_exit(leave_slot, 0);
    self.ordinal = self.slot->ordinal;
    self.database = find_database(self.slot->database.load());
    self.slot->latch.store(MyLatch);
    if (self.database == nullptr) {
        leave(WorkerExit::retired);
    }
}

// --- settings ---

struct HeaderList {
    const char** names;
    const char** values;
    std::size_t count;
    std::size_t room;
};

void add_header(void* context, const char* name, const char* value) {
    auto* list = static_cast<HeaderList*>(context);
    if (list->count == list->room) {
        list->room *= 2;
        list->names = static_cast<const char**>(repalloc(list->names, list->room * sizeof(char*)));
        list->values =
            static_cast<const char**>(repalloc(list->values, list->room * sizeof(char*)));
    }
    list->names[list->count] = pstrdup(name);
    list->values[list->count++] = pstrdup(value);
}

const char* effective_source(const char* database_name) {
    if (settings.source[0] != '\0') {
        return settings.source;
    }
    StringInfoData source;
    initStringInfo(&source);
    appendStringInfo(&source,
                     "urn:outbox:%llu:", static_cast<unsigned long long>(GetSystemIdentifier()));
    // RFC 8141: what is no plain character of a name is percent-encoded.
    for (const char* c = database_name; *c != '\0'; ++c) {
        const auto byte = static_cast<unsigned char>(*c);
        const bool plain = (byte >= '0' && byte <= '9') || (byte >= 'a' && byte <= 'z') ||
                           (byte >= 'A' && byte <= 'Z') || byte == '-' || byte == '_' ||
                           byte == '.';
        plain ? appendStringInfoChar(&source, *c) : appendStringInfo(&source, "%%%02X", byte);
    }
    return source.data;
}

// The settings as the bridge wants them, in the current memory context.
FlatConfig read_config(const char* database_name) {
    HeaderList headers = {};
    headers.room = 8;
    headers.names = static_cast<const char**>(palloc(headers.room * sizeof(char*)));
    headers.values = static_cast<const char**>(palloc(headers.room * sizeof(char*)));
    const char* why = nullptr;
    (void)read_headers_setting(settings.http_headers, add_header, &headers, &why);
    FlatConfig config = {};
    config.endpoint = settings.endpoint;
    config.format = format_name();
    config.source = effective_source(database_name);
    config.header_names = headers.names;
    config.header_values = headers.values;
    config.headers = headers.count;
    config.ca_file = settings.ca_file;
    config.max_in_flight = static_cast<std::size_t>(settings.max_in_flight);
    config.max_bytes = static_cast<std::size_t>(settings.max_in_flight_kb) * 1024;
    config.batch_size = static_cast<std::size_t>(settings.batch_size);
    config.connect_timeout = settings.connect_timeout_ms * kMillisecond;
    config.request_timeout = settings.request_timeout_ms * kMillisecond;
    config.retry.base = settings.retry_base_ms * kMillisecond;
    config.retry.cap = settings.retry_cap_ms * kMillisecond;
    config.max_attempts = settings.max_attempts;
    config.ordering =
        settings.ordering == kOrderingNone ? core::Ordering::none : core::Ordering::aggregate;
    return config;
}

// What ALTER DATABASE or ALTER ROLE SET may have changed, and planner choices that a claim must not
// have.
void override_settings() {
    static const char* const kOverrides[][2] = {
        {"search_path", "pg_catalog, pg_temp"},
        {"default_transaction_isolation", "read committed"},
        {"default_transaction_read_only", "off"},
        {"default_transaction_deferrable", "off"},
        {"session_replication_role", "origin"},
        {"statement_timeout", "0"},
        {"lock_timeout", "0"},
        {"idle_in_transaction_session_timeout", "0"},
        {"row_security", "off"},
        {"synchronous_commit", "off"},
        {"plan_cache_mode", "force_generic_plan"},
        {"jit", "off"},
        {"max_parallel_workers_per_gather", "0"},
        {"enable_seqscan", "off"},
        {"enable_bitmapscan", "off"},
        {"enable_sort", "off"},
        {"enable_incremental_sort", "off"},
        {"enable_hashjoin", "off"},
        {"enable_mergejoin", "off"},
        {"enable_hashagg", "off"},
        {"enable_material", "off"},
        {"enable_memoize", "off"},
        {"enable_nestloop", "on"},
        {"enable_indexscan", "on"},
        {"enable_indexonlyscan", "on"},
        {"enable_tidscan", "on"},
    };
    for (const auto& setting : kOverrides) {
        SetConfigOption(setting[0], setting[1], PGC_SUSET, PGC_S_OVERRIDE);
    }
}

// --- transactions ---

typedef void (*Work)(void* context);

enum class Attempt : std::uint8_t { done, failed, locked, gone };

// The error under way, kept for the status and the log; then the transaction is over.
void end_failed_transaction() {
    MemoryContextSwitchTo(self.memory);
    save_offender();
    ErrorData* error = CopyErrorData();
    FlushErrorState();
    snprintf(self.error, sizeof(self.error), "%s", error->message);
    FreeErrorData(error);
    AbortCurrentTransaction();
    MemoryContextSwitchTo(self.memory);
    forget_statements();
}

void begin_stop(WorkerExit reason) {
    if (self.stop_deadline == 0) {
        self.stop_deadline = steady_now() + settings.shutdown_timeout_ms * kMillisecond + 1;
        self.stop_reason = reason;
    }
}

// Once asked to stop, no statement outlives the grace: a user's trigger may sleep for ever.
void limit_statement_time() {
    if (stop_requested != 0) {
        begin_stop(WorkerExit::stopped);
        enable_timeout_after(STATEMENT_TIMEOUT,
                             static_cast<int>(Max(until(self.stop_deadline), 1L)));
    }
}

// Runs `work` in a transaction of its own. On failure nothing of it is in the table.
Attempt attempt(Work work, void* context) {
    volatile Attempt result = Attempt::failed;
    SetCurrentStatementStartTimestamp();
    pgstat_report_activity(STATE_RUNNING, "recording results and reading events");
    in_statement = 1;
    PG_TRY();
    {
        limit_statement_time();
        StartTransactionCommand();
        switch (begin_statements(&self.table)) {
        case Begun::yes:
            work(context);
            end_statements();
            result = Attempt::done;
            break;
        case Begun::locked:
            result = Attempt::locked;
            break;
        case Begun::gone:
            result = Attempt::gone;
            break;
        }
        CommitTransactionCommand();
    }
    PG_CATCH();
    {
        end_failed_transaction();
        result = Attempt::failed;
    }
    PG_END_TRY();
    in_statement = 0;
    disable_timeout(STATEMENT_TIMEOUT, false);
    QueryCancelPending = false;
    MemoryContextSwitchTo(self.memory);
    self.stats_pending = true;
    (void)pgstat_report_stat(false);
    pgstat_report_activity(STATE_IDLE, nullptr);
    return result;
}

void look_up_table(void* context) {
    *static_cast<Found*>(context) = find_table(&self.table);
}

// Finds the extension's table; leaves when there is none. A restart of this worker is the way into
// another table.
void find_extension() {
    Found found = Found::no_extension;
    const Oid before = self.table.relation;
    SetCurrentStatementStartTimestamp();
    StartTransactionCommand();
    PushActiveSnapshot(GetTransactionSnapshot());
    look_up_table(&found);
    PopActiveSnapshot();
    CommitTransactionCommand();
    MemoryContextSwitchTo(self.memory);
    if (found == Found::no_extension) {
        leave(WorkerExit::absent);
    }
    if (OidIsValid(before) && before != self.table.relation) {
        leave(WorkerExit::stopped);
    }
    forget_statements();
}

// --- a turn ---

// What one turn's transaction does.
struct Turn {
    std::size_t first;
    std::size_t results;
    Recorded* outcomes;
    bool claim;
    bool keep; // marks delivered rows also where they should be deleted: something refers to them
    ClaimCounts counts;
};

void record_work(void* context) {
    auto* turn = static_cast<Turn*>(context);
    const bool delete_delivered = settings.retention_s == 0 && !turn->keep;
    record_results(self.bridge, turn->first, turn->results, delete_delivered, turn->outcomes);
}

void claim_work(void* context) {
    auto* turn = static_cast<Turn*>(context);
    const auto factor = static_cast<std::size_t>(Max(self.database->desired_workers, 1));
    renew_horizon_if_due();
    if (self.discover) {
        discover_lanes(self.bridge);
    }
    if (self.orphans.running && steady_now() >= self.next_orphans) {
        const Micros start = steady_now();
        walk_orphans(self.bridge, &self.orphans);
        self.orphans_cost += steady_now() - start;
    }
    claim_followers(self.bridge, &turn->counts);
    claim_due(self.bridge, factor, &turn->counts);
    claim_ready(self.bridge, factor, &turn->counts);
    self.bridge->claim_ended();
}

void whole_turn(void* context) {
    auto* turn = static_cast<Turn*>(context);
    if (turn->results > 0) {
        record_work(context);
    }
    if (turn->claim) {
        claim_work(context);
    }
    park_rows(self.bridge, 0, self.bridge->take_parking());
}

void park_work(void* context) {
    park_rows(self.bridge, *static_cast<std::size_t*>(context), 1);
}

void count_recorded(const net::Result& result) {
    Counters& counters = self.slot->counters;
    if (result.kind == net::ResultKind::delivered) {
        counters.delivered.fetch_add(1);
        return;
    }
    counters.failed.fetch_add(1);
    if (result.kind == net::ResultKind::dead) {
        counters.dead.fetch_add(1);
    }
    set_last_error(spellable(result.error.c_str()));
    if (!log_failure(result)) {
        counters.log_suppressed.fetch_add(1);
    }
}

// Exponential in the number of deferrals, 100 ms to a minute.
Micros deferral(std::int32_t deferrals) {
    return Min((100 * kMillisecond) << Min(deferrals, 10), 60 * kSecond);
}

// The result stays in memory and is tried again; the event is not sent again meanwhile.
void cannot_record(std::size_t index) {
    const Micros pause = deferral(self.bridge->result(index).deferrals++);
    self.cannot_record_until = steady_now() + pause + kSecond;
    set_last_error(self.error);
    if (may_log()) {
        ereport(LOG, (errmsg("outbox: a result cannot be recorded, next try in %lld ms: %s",
                             static_cast<long long>(pause / kMillisecond), self.error),
                      errhidestmt(true)));
    } else {
        self.slot->counters.log_suppressed.fetch_add(1);
    }
    self.bridge->defer(index, steady_now() + pause);
}

void apply_outcome(std::size_t index, Recorded outcome) {
    net::Result& result = self.bridge->result(index);
    switch (outcome) {
    case Recorded::closed:
    case Recorded::waiting:
        count_recorded(result);
        self.bridge->settle(index, outcome == Recorded::closed ? core::Settled::closed
                                                               : core::Settled::waiting);
        break;
    case Recorded::changed:
        self.bridge->settle(index, core::Settled::changed);
        break;
    case Recorded::moved:
        self.bridge->defer(index, steady_now());
        break;
    case Recorded::refused:
        strlcpy(self.error, "the row was left unchanged, as by a trigger", sizeof(self.error));
        cannot_record(index);
        break;
    case Recorded::locked:
    case Recorded::no:
        self.bridge->defer(index, steady_now() + deferral(result.deferrals++));
        break;
    }
}

void apply_outcomes(const Turn& turn) {
    for (std::size_t i = 0; i < turn.results; ++i) {
        apply_outcome(turn.first + i, turn.outcomes[i]);
    }
}

// The whole turn failed: each result for itself, so that a bad one holds up no other.
void record_one_by_one(std::size_t results, Recorded* outcomes) {
    for (std::size_t i = 0; i < results; ++i) {
        Turn single = {};
        single.first = i;
        single.results = 1;
        single.outcomes = &outcomes[i];
        if (self.stop_deadline != 0 && steady_now() >= self.stop_deadline) {
            self.bridge->defer(i, steady_now());
            continue;
        }
        Attempt result = attempt(record_work, &single);
        if (result == Attempt::failed && settings.retention_s == 0) {
            single.keep = true;
            result = attempt(record_work, &single);
        }
        if (result == Attempt::done) {
            apply_outcomes(single);
            continue;
        }
        if (result != Attempt::failed) {
            self.bridge->defer(i, steady_now() + kLockedRetry);
            continue;
        }
        cannot_record(i);
    }
}

void back_off_turns() {
    self.turn_back_off =
        self.turn_back_off == 0 ? 100 * kMillisecond : Min(self.turn_back_off * 2, kMaxTurnBackOff);
    self.next_turn = steady_now() + self.turn_back_off;
    set_last_error(self.error);
    ereport(LOG, (errmsg("outbox: events cannot be read, next try in %lld ms: %s",
                         static_cast<long long>(self.turn_back_off / kMillisecond), self.error),
                  errhidestmt(true)));
}

void claim_succeeded(const Turn& turn) {
    self.discover = false;
    self.turn_back_off = 0;
    self.next_claim = turn.counts.passed == 0 ? steady_now() + kNoRoomRetry : 0;
    self.slot->counters.claimed.fetch_add(turn.counts.admitted);
    self.slot->counters.parked.fetch_add(turn.counts.parked);
    if (!self.orphans.running) {
        self.next_orphans = steady_now() + 20 * self.orphans_cost;
        self.orphans_cost = 0;
    }
}

// After a turn that failed: each row for itself, and what cannot be parked holds its aggregate
// until the next poll.
void park_one_by_one() {
    const std::size_t rows = self.bridge->take_parking();
    for (std::size_t i = 0; i < rows; ++i) {
        if (attempt(park_work, &i) != Attempt::done) {
            const auto& parking = self.bridge->parking(i);
            (void)self.bridge->hold({parking.aggregate_type.data(), parking.aggregate_type.size()},
                                    {parking.aggregate_id.data(), parking.aggregate_id.size()});
        }
    }
    self.bridge->parking_done();
}

// Claims alone, setting aside rows that cannot be read: those fail without being sent.
void claim_around_unreadable_rows() {
    for (int i = 0; i < kMaxUnreadable; ++i) {
        self.bridge->abandon_followers();
        Turn turn = {};
        turn.claim = true;
        if (attempt(claim_work, &turn) == Attempt::done) {
            claim_succeeded(turn);
            return;
        }
        if (!offender.known) {
            back_off_turns(); // or locked, or gone: the next turn sees to it
            return;
        }
        admit_offender(self.bridge, self.error);
    }
}

void table_is_locked() {
    self.next_turn = steady_now() + kLockedRetry;
    set_trouble(Trouble::table_locked);
}

// Records results and claims events in one short transaction; then sends what may be sent.
void run_turn(bool claim) {
    MemoryContextReset(self.memory);
    MemoryContextSwitchTo(self.memory);
    Turn turn = {};
    turn.claim = claim;
    turn.results = self.bridge->take_batch(kMaxBatch, steady_now());
    turn.outcomes = static_cast<Recorded*>(palloc0(turn.results + 1));
    self.slot->counters.turns.fetch_add(1);
    offender.known = false;
    switch (attempt(whole_turn, &turn)) {
    case Attempt::done:
        if (claim) {
            claim_succeeded(turn);
        }
        if (turn.results > 0) {
            self.next_claim = 0; // room
            apply_outcomes(turn);
        }
        self.bridge->parking_done();
        if (self.slot->trouble.load() == Trouble::table_locked) {
            set_trouble(Trouble::none);
        }
        break;
    case Attempt::failed:
        record_one_by_one(turn.results, turn.outcomes);
        if (claim && stop_requested == 0) {
            claim_around_unreadable_rows();
        }
        park_one_by_one();
        break;
    case Attempt::locked:
        for (std::size_t i = 0; i < turn.results; ++i) {
            self.bridge->defer(i, steady_now() + kLockedRetry);
        }
        table_is_locked();
        break;
    case Attempt::gone:
        find_extension();
        for (std::size_t i = 0; i < turn.results; ++i) {
            self.bridge->defer(i, steady_now());
        }
        break;
    }
    self.bridge->batch_done();
    if (flush_noted_commits()) {
        self.slot->counters.wal_flushes.fetch_add(1);
    }
}

// --- retention ---

struct PurgeStep {
    std::uint64_t end; // of the table
    std::uint64_t deleted;
};

void purge_work(void* context) {
    auto* step = static_cast<PurgeStep*>(context);
    step->end = table_end(self.table);
    step->deleted = purge_rows(self.purge_from, self.purge_from + self.purge_span,
                               settings.retention_s, kPurgeRows);
}

bool purges() {
    return settings.retention_s >= 0 && (self.bridge->buckets() & core::bucket_bit(0)) != 0;
}

// Something in the stretch cannot be deleted: look closer, down to the row, and pass that by.
void purge_failed() {
    if (self.purge_span > 1) {
        self.purge_span /= 2;
        return;
    }
    ++self.purge_from;
    set_last_error(self.error);
    if (steady_now() >= self.next_purge_log) {
        self.next_purge_log = steady_now() + kPurgeLogPause;
        ereport(LOG, (errmsg("outbox: a delivered event cannot be deleted: %s", self.error),
                      errhidestmt(true)));
    }
}

void purge_succeeded(const PurgeStep& step) {
    if (step.deleted < kPurgeRows) {
        self.purge_from += self.purge_span;
        self.purge_span = Min(self.purge_span * 2, kPurgeSpan);
    }
    if (self.purge_from >= step.end) {
        self.purge_from = 0;
        const Micros wish = Min(Max(settings.retention_s / 4, 1), 60) * kSecond;
        self.next_purge = steady_now() + Max(wish, 20 * self.purge_cost);
        self.purge_cost = 0;
    }
}

// One stretch of the table a step; a sweep is followed by a rest of 20 times its cost.
void purge() {
    MemoryContextReset(self.memory);
    MemoryContextSwitchTo(self.memory);
    self.purge_span = Max(self.purge_span, std::uint64_t{1});
    PurgeStep step = {};
    const Micros start = steady_now();
    const Attempt result = attempt(purge_work, &step);
    const Micros cost = steady_now() - start;
    self.purge_cost += cost;
    self.next_purge = steady_now() + 2 * cost;
    switch (result) {
    case Attempt::done:
        purge_succeeded(step);
        break;
    case Attempt::failed:
        purge_failed();
        break;
    case Attempt::locked:
    case Attempt::gone:
        self.next_purge = steady_now() + kLockedRetry;
        break;
    }
}

// --- what changed ---

void look_at_everything() {
    (void)self.bridge->rescan();
    (void)self.bridge->release_holds();
    self.discover = true;
    self.orphans.running = true;
}

// Reads the announcements of commits.
void read_ring() {
    const std::uint64_t head = self.database->ring_head.load();
    self.ring_waits = false;
    if (head == self.ring_tail) {
        return;
    }
    self.slot->counters.wakeups_commit.fetch_add(1);
    self.next_claim = 0;
    while (self.ring_tail < head) {
        const Announcement& entry = self.database->ring[self.ring_tail % kRingSize];
        const std::uint64_t stamp = entry.stamp.load();
        if (head - self.ring_tail > kRingSize || stamp > self.ring_tail + 1) {
            self.ring_tail = head; // overrun: what it said is lost
            look_at_everything();
            return;
        }
        if (stamp != self.ring_tail + 1) {
            self.ring_waits = true; // its writer is at it
            return;
        }
        const std::uint32_t tag = entry.tag.load();
        const std::int64_t lo = entry.lo.load();
        const std::int64_t hi = entry.hi.load();
        const bool everything = entry.everything.load();
        if (entry.stamp.load() != stamp) {
            continue; // overwritten while reading: the next look sees the overrun
        }
        ++self.ring_tail;
        if (everything) {
            look_at_everything();
        } else if (!self.bridge->announced(tag, lo, hi)) {
            self.discover = true;
        }
    }
}

void poll_if_due() {
    const Micros now = steady_now();
    if (now < self.next_poll) {
        return;
    }
    self.next_poll = now + settings.poll_interval_ms * kMillisecond;
    self.slot->counters.wakeups_poll.fetch_add(1);
    look_at_everything();
}

// Which buckets are mine, and which I have to give away as soon as nothing of them is in flight.
void sync_buckets() {
    const int workers = self.database->desired_workers;
    core::BucketMask mine = 0;
    core::BucketMask leaving = 0;
    for (unsigned bucket = 0; bucket < core::kBuckets; ++bucket) {
        if (self.database->owner[bucket].load() != self.ordinal) {
            continue;
        }
        const bool stays =
            workers > 0 &&
            static_cast<int>(bucket % static_cast<unsigned>(workers)) == self.ordinal;
        (stays || workers == 0 ? mine : leaving) |= core::bucket_bit(bucket);
    }
    const core::BucketMask gained = mine & ~self.bridge->buckets();
    if (mine != self.bridge->buckets()) {
        (void)self.bridge->set_buckets(mine);
        self.slot->buckets.store(mine);
    }
    if (gained != 0) {
        look_at_everything();
    }
    self.leaving = leaving;
    const core::BucketMask free = leaving & ~self.bridge->busy_buckets();
    for (unsigned bucket = 0; bucket < core::kBuckets && free != 0; ++bucket) {
        if ((free & core::bucket_bit(bucket)) != 0) {
            self.database->owner[bucket].store(
                static_cast<std::uint8_t>(bucket % static_cast<unsigned>(workers)));
        }
    }
    self.leaving &= ~free;
    if (free != 0) {
        wake_all_workers(MyDatabaseId);
    }
    if (mine == 0 && leaving == free && workers > 0 && self.ordinal >= workers) {
        leave(WorkerExit::retired);
    }
}

void reload_settings() {
    ConfigReloadPending = false;
    ProcessConfigFile(PGC_SIGHUP);
    MemoryContextReset(self.memory);
    MemoryContextSwitchTo(self.memory);
    const FlatConfig config = read_config(self.database_name);
    (void)self.bridge->configure(config);
    self.next_poll = 0;
    self.next_purge = 0;
}

// Leaves when everything in flight is answered and recorded, or the grace is over.
void leave_when_done() {
    const bool done = self.bridge->in_flight() == 0 && self.bridge->unrecorded() == 0;
    if (done || steady_now() >= self.stop_deadline) {
        leave(self.stop_reason);
    }
}

// --- the loop ---

bool wants_claim() {
    if (!self.bridge->has_target() || self.stop_deadline != 0) {
        return false;
    }
    if (self.discover) {
        return true;
    }
    if (steady_now() < self.next_claim) {
        return false;
    }
    return (self.orphans.running && steady_now() >= self.next_orphans) ||
           self.bridge->wants_ready() || self.bridge->wants_due(GetCurrentTimestamp()) ||
           self.bridge->wants_followers();
}

bool wants_recording() {
    return self.bridge->has_results(steady_now()) || self.bridge->wants_parking();
}

long sleep_time() {
    if ((self.leaving & ~self.bridge->busy_buckets()) != 0) {
        return 0; // the turn has just freed one
    }
    long timeout = until(self.next_poll);
    if (const long http = self.bridge->timeout_ms(); http >= 0) {
        timeout = Min(timeout, http);
    }
    Micros at = 0;
    if (self.bridge->next_deferred(&at)) {
        timeout = Min(timeout, until(at));
    }
    if (self.stop_deadline == 0 && self.bridge->has_target() && self.bridge->next_due(&at)) {
        // What is due already waits for room, and is seen to when there is some.
        const Micros left = at - Min(at, GetCurrentTimestamp());
        timeout = left > 0 ? Min(timeout, static_cast<long>(left / kMillisecond + 1)) : timeout;
    }
    if (wants_recording() || wants_claim() || self.next_turn > steady_now()) {
        timeout = Min(timeout, until(self.next_turn));
    }
    if (self.next_claim > steady_now()) {
        timeout = Min(timeout, until(self.next_claim));
    }
    if (self.ring_waits) {
        timeout = Min(timeout, 1L);
    }
    if (self.stop_deadline != 0) {
        timeout = Min(timeout, until(self.stop_deadline));
    } else if (purges()) {
        timeout = Min(timeout, until(self.next_purge));
    }
    return timeout;
}

void sleep_until_something() {
    const long timeout = sleep_time();
    if (timeout > 0 && self.stats_pending && self.bridge->in_flight() == 0) {
        // Nothing under way: hand in the statistics now, or autovacuum never hears of us.
        (void)pgstat_report_stat(true);
        self.stats_pending = false;
    }
    WaitEvent events[3];
    (void)WaitEventSetWait(self.waits, timeout, events, lengthof(events), kWaitEventExtension);
}

void look_around() {
    if (self.extension_changes != self.database->extension_changes.load()) {
        self.extension_changes = self.database->extension_changes.load();
        find_extension();
    }
    if (ConfigReloadPending) {
        reload_settings();
    }
    if (stop_requested != 0) {
        begin_stop(WorkerExit::stopped);
    } else if (self.database->desired_workers == 0) {
        begin_stop(WorkerExit::retired);
    }
    sync_buckets();
    read_ring();
    poll_if_due();
}

// The bridge lost its footing (memory, a broken invariant): all is found again in the table by a
// new worker.
void check_bridge() {
    if (self.bridge->broken()) {
        OUTBOX_RAISE_GUARDED();
    }
}

void run() {
    for (;;) {
        ResetLatch(MyLatch);
        QueryCancelPending = false; // pg_cancel_backend: nothing to cancel here
        CHECK_FOR_INTERRUPTS();
        look_around();
        (void)self.bridge->step(steady_now());
        if (steady_now() >= self.next_turn && (wants_recording() || wants_claim())) {
            run_turn(wants_claim());
        }
        if (self.stop_deadline == 0) {
            (void)self.bridge->start(steady_now());
            if (purges() && steady_now() >= self.next_purge) {
                purge();
            }
        }
        check_bridge();
        log_suppressed();
        publish();
        if (self.stop_deadline != 0) {
            leave_when_done();
        }
        sleep_until_something();
    }
}

void start_bridge() {
    if (curl_global_init(CURL_GLOBAL_DEFAULT) != CURLE_OK) {
        ereport(ERROR, (errcode(ERRCODE_INTERNAL_ERROR), errmsg("outbox: libcurl does not start")));
    }
    StartTransactionCommand();
    char* name = get_database_name(MyDatabaseId);
    if (name != nullptr) {
        strlcpy(self.database_name, name, sizeof(self.database_name));
    }
    CommitTransactionCommand();
    MemoryContextSwitchTo(self.memory);
    const FlatConfig config = read_config(self.database_name);
    self.bridge = Bridge::create(config, pg_prng_uint32(&pg_global_prng_state));
    if (self.bridge == nullptr) {
        OUTBOX_RAISE_GUARDED();
    }
    self.waits = CreateWaitEventSet(TopMemoryContext, 3);
    AddWaitEventToSet(self.waits, WL_LATCH_SET, PGINVALID_SOCKET, MyLatch, nullptr);
    AddWaitEventToSet(self.waits, WL_EXIT_ON_PM_DEATH, PGINVALID_SOCKET, nullptr, nullptr);
    AddWaitEventToSet(self.waits, WL_SOCKET_READABLE, self.bridge->wait_fd(), nullptr, nullptr);
}

void begin(int index) {
    attach(index);
    BackgroundWorkerInitializeConnectionByOid(self.slot->database.load(), InvalidOid, 0);
    override_settings();
    self.memory = AllocSetContextCreate(TopMemoryContext, "outbox turn", ALLOCSET_DEFAULT_SIZES);
    self.extension_changes = self.database->extension_changes.load();
    find_extension();
    self.database->state = DatabaseState::present;
    wake_launcher(); // it may start the others
    self.ring_tail = self.database->ring_head.load();
    start_bridge();
    look_at_everything();
    self.next_poll = steady_now() + settings.poll_interval_ms * kMillisecond;
}

} // namespace

} // namespace outbox::pg

void outbox_worker_main(Datum argument) {
    pqsignal(SIGTERM, outbox::pg::on_sigterm);
    pqsignal(SIGHUP, SignalHandlerForConfigReload);
    BackgroundWorkerUnblockSignals();
    outbox::pg::begin(DatumGetInt32(argument));
    outbox::pg::run();
}
