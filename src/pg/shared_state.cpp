// See shared_state.hpp.
#include "pg/shared_state.hpp"

namespace outbox::pg {

SharedState* shared = nullptr;

namespace {

constexpr const char* kName = "outbox";

// A crash within this time after the one before counts as one in a row.
constexpr int64 kCalmMs = INT64CONST(300'000);
constexpr int64 kFirstDelayMs = 100;
constexpr int64 kMaxDelayMs = 30'000;

shmem_request_hook_type previous_request_hook = nullptr;
shmem_startup_hook_type previous_startup_hook = nullptr;

// Postmaster memory: outlives the shared memory that a crash wipes.
bool started_before = false;
std::uint32_t crashes_in_a_row = 0;
TimestampTz last_start = 0;

Size shared_size() {
    return add_size(offsetof(SharedState, workers),
                    mul_size(static_cast<Size>(max_worker_processes), sizeof(WorkerSlot)));
}

void request() {
    if (previous_request_hook != nullptr) {
        previous_request_hook();
    }
    RequestAddinShmemSpace(shared_size());
    RequestNamedLWLockTranche(kName, 1);
}

int64 crash_delay_ms() {
    if (crashes_in_a_row == 0) {
        return 0;
    }
    const std::uint32_t doublings = Min(crashes_in_a_row - 1, 20U);
    return Min(kFirstDelayMs << doublings, kMaxDelayMs);
}

// Every run but the first follows a crash: the postmaster lives on and makes its memory anew.
void count_crashes() {
    const TimestampTz now = GetCurrentTimestamp();
    if (started_before) {
        const bool calm = TimestampDifferenceExceeds(last_start, now,
                                                     static_cast<int>(kCalmMs + crash_delay_ms()));
        crashes_in_a_row = calm ? 1 : crashes_in_a_row + 1;
    }
    started_before = true;
    last_start = now;
}

void startup() {
    if (previous_startup_hook != nullptr) {
        previous_startup_hook();
    }
    bool found = false;
    LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
    shared = static_cast<SharedState*>(ShmemInitStruct(kName, shared_size(), &found));
    if (!found) {
        std::memset(static_cast<void*>(shared), 0, shared_size());
        shared->lock = &GetNamedLWLockTranche(kName)->lock;
        shared->worker_slots = max_worker_processes;
        for (int i = 0; i < shared->worker_slots; ++i) {
            SpinLockInit(&shared->workers[i].error_lock);
        }
        count_crashes();
        shared->crash_restarts = crashes_in_a_row;
        shared->start_workers_at =
            TimestampTzPlusMilliseconds(GetCurrentTimestamp(), crash_delay_ms());
    }
    LWLockRelease(AddinShmemInitLock);
}

Announcement& claim_ring_slot(DatabaseSlot* slot, std::uint64_t* position) {
    *position = slot->ring_head.fetch_add(1);
    Announcement& entry = slot->ring[*position % kRingSize];
    entry.stamp.store(0);
    return entry;
}

} // namespace

void request_shared_state() {
    previous_request_hook = shmem_request_hook;
    shmem_request_hook = request;
    previous_startup_hook = shmem_startup_hook;
    shmem_startup_hook = startup;
}

DatabaseSlot* find_database(Oid database) {
    if (shared == nullptr || !OidIsValid(database)) {
        return nullptr;
    }
    for (DatabaseSlot& slot : shared->databases) {
        if (slot.database.load(std::memory_order_acquire) == database) {
            return &slot;
        }
    }
    return nullptr;
}

void announce(DatabaseSlot* slot, std::uint32_t tag, std::int64_t lo, std::int64_t hi) {
    std::uint64_t position = 0;
    Announcement& entry = claim_ring_slot(slot, &position);
    entry.tag.store(tag);
    entry.lo.store(lo);
    entry.hi.store(hi);
    entry.everything.store(false);
    entry.stamp.store(position + 1);
}

void announce_everything(DatabaseSlot* slot) {
    std::uint64_t position = 0;
    Announcement& entry = claim_ring_slot(slot, &position);
    entry.everything.store(true);
    entry.stamp.store(position + 1);
}

namespace {

void wake(const WorkerSlot& worker) {
    if (Latch* latch = worker.latch.load(); latch != nullptr) {
        SetLatch(latch);
    }
}

} // namespace

void wake_workers(Oid database, core::BucketMask buckets) {
    for (int i = 0; i < shared->worker_slots; ++i) {
        const WorkerSlot& worker = shared->workers[i];
        if (worker.database.load() == database && (worker.buckets.load() & buckets) != 0) {
            wake(worker);
        }
    }
}

void wake_all_workers(Oid database) {
    for (int i = 0; i < shared->worker_slots; ++i) {
        if (shared->workers[i].database.load() == database) {
            wake(shared->workers[i]);
        }
    }
}

void wake_launcher() {
    if (Latch* latch = shared->launcher_latch.load(); latch != nullptr) {
        SetLatch(latch);
    }
}

void extension_changed(Oid database) {
    if (DatabaseSlot* slot = find_database(database); slot != nullptr) {
        slot->asked = true;
        slot->extension_changes.fetch_add(1);
        wake_all_workers(database);
    } else {
        shared->reconcile_asked.store(true);
    }
    wake_launcher();
}

const char* trouble_name(Trouble trouble) {
    switch (trouble) {
    case Trouble::none:
        return "ok";
    case Trouble::no_endpoint:
        return "no endpoint";
    case Trouble::cannot_record:
        return "results cannot be recorded";
    case Trouble::turn_fails:
        return "events cannot be read";
    case Trouble::endpoint_fails:
        return "endpoint failing";
    case Trouble::table_locked:
        return "table locked";
    }
    return "unknown";
}

} // namespace outbox::pg
