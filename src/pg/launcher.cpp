// See launcher.hpp. One loop: look at what changed, start and count out workers, sleep until the
// next deadline.
#include "pg/launcher.hpp"

#include "pg/settings.hpp"
#include "pg/shared_state.hpp"

extern "C" {
PGDLLEXPORT void outbox_launcher_main(Datum argument);
}

namespace outbox::pg {

namespace {

constexpr int64 kReconcileMs = 60'000;
constexpr int64 kStartTimeoutMs = 60'000;
constexpr int64 kFirstRestartMs = 500;
constexpr int64 kMaxRestartMs = 60'000;
constexpr int64 kNoSlotRetryMs = 5'000;
constexpr int64 kStableMs = 60'000; // a worker that lived that long was well
constexpr int kMaxProbes = 2;       // databases looked into at once

volatile sig_atomic_t stop_requested = 0;

void on_sigterm([[maybe_unused]] SIGNAL_ARGS) {
    const int saved_errno = errno;
    stop_requested = 1;
    SetLatch(MyLatch);
    errno = saved_errno;
}

// Handles of workers that this launcher started, by worker slot; null for those of a launcher
// before it.
BackgroundWorkerHandle** handles = nullptr;
TimestampTz next_reconcile = 0;
TimestampTz next_slot_warning = 0;

// --- databases ---

DatabaseSlot* add_database(Oid database) {
    for (DatabaseSlot& slot : shared->databases) {
        if (slot.database.load() != InvalidOid) {
            continue;
        }
        slot.state = DatabaseState::unknown;
        slot.wanted = false;
        slot.no_free_slot = false;
        slot.asked = false;
        slot.desired_workers = 0;
        slot.failures = 0;
        slot.next_start = 0;
        slot.without_workers_since.store(GetCurrentTimestamp());
        for (Announcement& entry : slot.ring) {
            entry.stamp.store(0);
        }
        slot.ring_head.store(0);
        slot.database.store(database, std::memory_order_release);
        return &slot;
    }
    return nullptr;
}

bool has_workers(Oid database) {
    for (int i = 0; i < shared->worker_slots; ++i) {
        if (shared->workers[i].database.load() == database &&
            shared->workers[i].status.load() != WorkerStatus::free) {
            return true;
        }
    }
    return false;
}

void see_database(Oid database, const char* name, bool is_template) {
    const bool wanted = database_wanted(name, is_template);
    DatabaseSlot* slot = find_database(database);
    if (slot == nullptr && wanted) {
        slot = add_database(database);
        if (slot == nullptr) {
            ereport(LOG, (errmsg("outbox: more than %d databases; \"%s\" gets no relay",
                                 kMaxDatabases, name),
                          errhint("List the databases that need one in outbox.databases.")));
        }
    }
    if (slot != nullptr) {
        slot->wanted = wanted;
    }
}

// Compares the slots with pg_database. Runs in a transaction of its own.
void reconcile() {
    SetCurrentStatementStartTimestamp();
    StartTransactionCommand();
    (void)GetTransactionSnapshot();
    Relation relation = table_open(DatabaseRelationId, AccessShareLock);
    TableScanDesc scan = table_beginscan_catalog(relation, 0, nullptr);
    bool seen[kMaxDatabases] = {};
    HeapTuple tuple = nullptr;
    while ((tuple = heap_getnext(scan, ForwardScanDirection)) != nullptr) {
        const auto* row = reinterpret_cast<Form_pg_database>(GETSTRUCT(tuple));
        if (!row->datallowconn) {
            continue;
        }
        see_database(row->oid, NameStr(row->datname), row->datistemplate);
        if (DatabaseSlot* slot = find_database(row->oid); slot != nullptr) {
            seen[slot - shared->databases] = true;
        }
    }
    table_endscan(scan);
    table_close(relation, AccessShareLock);
    CommitTransactionCommand();
    for (DatabaseSlot& slot : shared->databases) {
        if (slot.database.load() != InvalidOid && !seen[&slot - shared->databases]) {
            slot.wanted = false;
            if (!has_workers(slot.database.load())) {
                slot.database.store(InvalidOid);
            }
        }
    }
}

// --- workers ---

int64 restart_delay_ms(int failures) {
    return Min(kFirstRestartMs << Min(failures - 1, 10), kMaxRestartMs);
}

void count_failure(DatabaseSlot* slot, const WorkerSlot& worker) {
    const TimestampTz now = GetCurrentTimestamp();
    const bool was_well = TimestampDifferenceExceeds(worker.launched_at, now, kStableMs);
    slot->failures = was_well ? 1 : slot->failures + 1;
    slot->next_start = TimestampTzPlusMilliseconds(now, restart_delay_ms(slot->failures));
}

// A worker is gone: what follows from that, and its slot is free again.
void reap(WorkerSlot& worker) {
    DatabaseSlot* slot = find_database(worker.database.load());
    if (slot != nullptr) {
        switch (worker.exit) {
        case WorkerExit::absent:
            slot->state = slot->asked ? DatabaseState::unknown : DatabaseState::absent;
            slot->asked = false;
            break;
        case WorkerExit::retired:
            break;
        case WorkerExit::stopped:
            slot->next_start = TimestampTzPlusMilliseconds(GetCurrentTimestamp(), kFirstRestartMs);
            break;
        case WorkerExit::failed:
            count_failure(slot, worker);
            next_reconcile = 0; // the database may be gone
            break;
        }
    }
    const int index = static_cast<int>(&worker - shared->workers);
    if (handles[index] != nullptr) {
        pfree(handles[index]);
        handles[index] = nullptr;
    }
    LWLockAcquire(shared->lock, LW_EXCLUSIVE);
    ++worker.generation;
    worker.buckets.store(0);
    worker.latch.store(nullptr);
    worker.database.store(InvalidOid);
    worker.status.store(WorkerStatus::free);
    LWLockRelease(shared->lock);
    if (slot != nullptr && !has_workers(slot->database.load())) {
        slot->without_workers_since.store(GetCurrentTimestamp());
    }
}

// A worker that never came to life: the postmaster could not start it, or nobody knows.
bool start_failed(const WorkerSlot& worker) {
    const int index = static_cast<int>(&worker - shared->workers);
    pid_t pid = 0;
    if (handles[index] != nullptr) {
        return GetBackgroundWorkerPid(handles[index], &pid) == BGWH_STOPPED;
    }
    return TimestampDifferenceExceeds(worker.launched_at, GetCurrentTimestamp(), kStartTimeoutMs);
}

void reap_all() {
    for (int i = 0; i < shared->worker_slots; ++i) {
        WorkerSlot& worker = shared->workers[i];
        if (worker.status.load() == WorkerStatus::starting && start_failed(worker)) {
            // It may have come and gone between the two looks.
            if (worker.status.load() == WorkerStatus::starting) {
                worker.exit = WorkerExit::failed;
                worker.status.store(WorkerStatus::exited);
            }
        }
        if (worker.status.load() == WorkerStatus::exited) {
            reap(worker);
        }
    }
}

WorkerSlot* find_worker(Oid database, int ordinal) {
    for (int i = 0; i < shared->worker_slots; ++i) {
        WorkerSlot& worker = shared->workers[i];
        if (worker.status.load() != WorkerStatus::free && worker.database.load() == database &&
            worker.ordinal == ordinal) {
            return &worker;
        }
    }
    return nullptr;
}

WorkerSlot* free_worker() {
    for (int i = 0; i < shared->worker_slots; ++i) {
        if (shared->workers[i].status.load() == WorkerStatus::free) {
            return &shared->workers[i];
        }
    }
    return nullptr;
}

void reset_worker(WorkerSlot& worker, Oid database, int ordinal) {
    worker.exit = WorkerExit::failed;
    worker.ordinal = ordinal;
    worker.pid = 0;
    worker.latch.store(nullptr);
    worker.launched_at = GetCurrentTimestamp();
    worker.buckets.store(0);
    worker.in_flight.store(0);
    worker.unrecorded.store(0);
    worker.trouble.store(Trouble::none);
    worker.trouble_since.store(worker.launched_at);
    worker.last_error[0] = '\0';
    std::memset(static_cast<void*>(&worker.counters), 0, sizeof(worker.counters));
    worker.database.store(database);
    worker.status.store(WorkerStatus::starting);
}

bool register_worker(WorkerSlot& worker) {
    const int index = static_cast<int>(&worker - shared->workers);
    BackgroundWorker settings_of = {};
    settings_of.bgw_flags = BGWORKER_SHMEM_ACCESS | BGWORKER_BACKEND_DATABASE_CONNECTION;
    settings_of.bgw_start_time = BgWorkerStart_RecoveryFinished;
    settings_of.bgw_restart_time = BGW_NEVER_RESTART;
    strlcpy(settings_of.bgw_library_name, "outbox", BGW_MAXLEN);
    strlcpy(settings_of.bgw_function_name, "outbox_worker_main", BGW_MAXLEN);
    snprintf(settings_of.bgw_name, BGW_MAXLEN, "outbox worker %d of database %u", worker.ordinal,
             worker.database.load());
    strlcpy(settings_of.bgw_type, "outbox worker", BGW_MAXLEN);
    settings_of.bgw_main_arg = Int32GetDatum(index);
    std::memcpy(settings_of.bgw_extra, &worker.generation, sizeof(worker.generation));
    settings_of.bgw_notify_pid = MyProcPid;
    return RegisterDynamicBackgroundWorker(&settings_of, &handles[index]);
}

void warn_no_slot() {
    const TimestampTz now = GetCurrentTimestamp();
    if (now < next_slot_warning) {
        return;
    }
    next_slot_warning = TimestampTzPlusMilliseconds(now, kReconcileMs);
    ereport(WARNING,
            (errcode(ERRCODE_INSUFFICIENT_RESOURCES),
             errmsg("outbox: no free worker slot, some events wait"),
             errhint("Raise max_worker_processes: the launcher takes one, each database with the "
                     "extension takes outbox.workers, and parallel queries need some as well.")));
}

// False when no process can be had.
bool start_worker(DatabaseSlot& slot, int ordinal) {
    WorkerSlot* worker = free_worker();
    if (worker != nullptr) {
        LWLockAcquire(shared->lock, LW_EXCLUSIVE);
        reset_worker(*worker, slot.database.load(), ordinal);
        LWLockRelease(shared->lock);
        if (register_worker(*worker)) {
            slot.no_free_slot = false;
            return true;
        }
        worker->database.store(InvalidOid);
        worker->status.store(WorkerStatus::free);
    }
    slot.no_free_slot = true;
    slot.next_start = TimestampTzPlusMilliseconds(GetCurrentTimestamp(), kNoSlotRetryMs);
    warn_no_slot();
    return false;
}

// Buckets of a worker that is gone and not wanted any more go to their new owner at once: nothing
// of them is in flight.
void adopt_orphaned_buckets(DatabaseSlot& slot) {
    for (unsigned bucket = 0; bucket < core::kBuckets; ++bucket) {
        const int owner = slot.owner[bucket].load();
        if (owner >= slot.desired_workers && slot.desired_workers > 0 &&
            find_worker(slot.database.load(), owner) == nullptr) {
            slot.owner[bucket].store(
                static_cast<std::uint8_t>(bucket % static_cast<unsigned>(slot.desired_workers)));
            wake_all_workers(slot.database.load());
        }
    }
}

int desired_workers(const DatabaseSlot& slot) {
    if (!slot.wanted || slot.state == DatabaseState::absent) {
        return 0;
    }
    return slot.state == DatabaseState::unknown ? 1 : settings.workers;
}

// Tells workers of a changed number; a worker hands its buckets over by itself (see worker.cpp).
void set_desired_workers(DatabaseSlot& slot, int count) {
    if (slot.desired_workers == 0 && count > 0 && !has_workers(slot.database.load())) {
        for (unsigned bucket = 0; bucket < core::kBuckets; ++bucket) {
            slot.owner[bucket].store(
                static_cast<std::uint8_t>(bucket % static_cast<unsigned>(count)));
        }
    }
    if (slot.desired_workers != count) {
        slot.desired_workers = count;
        wake_all_workers(slot.database.load());
    }
}

int count_probes() {
    int probes = 0;
    for (const DatabaseSlot& slot : shared->databases) {
        if (slot.database.load() != InvalidOid && slot.state == DatabaseState::unknown &&
            has_workers(slot.database.load())) {
            ++probes;
        }
    }
    return probes;
}

// Starts what is missing in one database; the next time to look, or PG_INT64_MAX.
TimestampTz tend(DatabaseSlot& slot) {
    if (slot.asked && slot.state == DatabaseState::absent) {
        slot.state = DatabaseState::unknown;
        slot.next_start = 0;
        slot.failures = 0;
    }
    set_desired_workers(slot, desired_workers(slot));
    adopt_orphaned_buckets(slot);
    for (int ordinal = 0; ordinal < slot.desired_workers; ++ordinal) {
        if (find_worker(slot.database.load(), ordinal) != nullptr) {
            continue;
        }
        if (slot.next_start > GetCurrentTimestamp()) {
            return slot.next_start;
        }
        if (slot.state == DatabaseState::unknown && count_probes() >= kMaxProbes) {
            return PG_INT64_MAX; // the end of a probe wakes us
        }
        if (!start_worker(slot, ordinal)) {
            return slot.next_start;
        }
        slot.asked = false;
    }
    return PG_INT64_MAX;
}

// --- the loop ---

TimestampTz look_after_all() {
    reap_all();
    const TimestampTz now = GetCurrentTimestamp();
    if (now >= next_reconcile || shared->reconcile_asked.exchange(false)) {
        reconcile();
        next_reconcile = TimestampTzPlusMilliseconds(now, kReconcileMs);
    }
    if (now < shared->start_workers_at) {
        return Min(next_reconcile, shared->start_workers_at);
    }
    TimestampTz next = next_reconcile;
    for (DatabaseSlot& slot : shared->databases) {
        if (slot.database.load() != InvalidOid) {
            next = Min(next, tend(slot));
        }
    }
    return next;
}

void forget_launcher(int /*code*/, Datum /*argument*/) {
    shared->launcher_latch.store(nullptr);
    shared->launcher_pid.store(0);
}

void attach_launcher() {
    shared->launcher_latch.store(MyLatch);
    shared->launcher_pid.store(MyProcPid);
    shared->launcher_since.store(GetCurrentTimestamp());
    before_shmem_exit(forget_launcher, 0);
    handles = static_cast<BackgroundWorkerHandle**>(
        MemoryContextAllocZero(TopMemoryContext, sizeof(BackgroundWorkerHandle*) *
                                                     static_cast<Size>(shared->worker_slots)));
    if (shared->crash_restarts > 0) {
        long seconds = 0;
        int micros = 0;
        TimestampDifference(GetCurrentTimestamp(), shared->start_workers_at, &seconds, &micros);
        ereport(LOG, (errmsg("outbox: crash restart %u in a row, workers start in %ld ms",
                             shared->crash_restarts, seconds * 1000 + micros / 1000)));
    }
}

void run() {
    attach_launcher();
    while (stop_requested == 0) {
        ResetLatch(MyLatch);
        CHECK_FOR_INTERRUPTS();
        if (ConfigReloadPending) {
            ConfigReloadPending = false;
            ProcessConfigFile(PGC_SIGHUP);
            next_reconcile = 0;
        }
        const TimestampTz next = look_after_all();
        const long wait = TimestampDifferenceMilliseconds(GetCurrentTimestamp(), next);
        (void)WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH, wait + 1,
                        kWaitEventExtension);
    }
}

} // namespace

void register_launcher() {
    BackgroundWorker launcher = {};
    launcher.bgw_flags = BGWORKER_SHMEM_ACCESS | BGWORKER_BACKEND_DATABASE_CONNECTION;
    launcher.bgw_start_time = BgWorkerStart_RecoveryFinished;
    launcher.bgw_restart_time = 1;
    strlcpy(launcher.bgw_library_name, "outbox", BGW_MAXLEN);
    strlcpy(launcher.bgw_function_name, "outbox_launcher_main", BGW_MAXLEN);
    strlcpy(launcher.bgw_name, "outbox launcher", BGW_MAXLEN);
    strlcpy(launcher.bgw_type, "outbox launcher", BGW_MAXLEN);
    RegisterBackgroundWorker(&launcher);
}

} // namespace outbox::pg

void outbox_launcher_main(Datum /*argument*/) {
    pqsignal(SIGTERM, outbox::pg::on_sigterm);
    pqsignal(SIGHUP, SignalHandlerForConfigReload);
    BackgroundWorkerUnblockSignals();
    BackgroundWorkerInitializeConnection(nullptr, nullptr, 0);
    outbox::pg::run();
    // A clean end of a static worker would not be started again; at shutdown nobody starts it
    // anyway.
    proc_exit(1);
}
