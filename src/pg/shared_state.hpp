// What launcher, workers and writers share: a slot per database, a slot per worker process, and a
// ring of commit announcements per database. Plain memory and atomics; the only lock is taken by
// launcher and workers when slots change hands, never by a writer. A crash of any process wipes all
// of it.
#pragma once

#include "core/bucket.hpp"
#include "pg/prelude.hpp"

namespace outbox::pg {

constexpr int kMaxDatabases = 64;
constexpr int kMaxWorkersPerDatabase = 64;
constexpr std::uint64_t kRingSize = 512; // a power of two

static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

// A commit inserted rows lo..hi in the lane with that tag. Stamp is the position + 1 when the rest
// is written. Tag and range are hints: a reader that finds them overwritten reads everything again.
struct Announcement {
    std::atomic<std::uint64_t> stamp;
    std::atomic<std::int64_t> lo;
    std::atomic<std::int64_t> hi;
    std::atomic<std::uint32_t> tag;
    std::atomic<bool> everything; // too much to say: read all again
};

// What the launcher knows of a database.
enum class DatabaseState : std::uint8_t {
    unknown, // to be probed
    present, // has the extension
    absent,  // has it not
};

struct DatabaseSlot {
    std::atomic<Oid> database; // InvalidOid: free
    DatabaseState state;
    bool wanted;       // by outbox.databases
    bool no_free_slot; // the last start found no worker slot
    bool asked;        // CREATE or DROP EXTENSION committed since a worker last looked
    int desired_workers;
    int failures; // starts in a row that ended in an error
    TimestampTz next_start;
    std::atomic<TimestampTz> without_workers_since;
    std::atomic<std::uint32_t> extension_changes;    // commits of CREATE or DROP EXTENSION
    std::atomic<std::uint8_t> owner[core::kBuckets]; // ordinal of the worker
    std::atomic<std::uint64_t> ring_head;
    Announcement ring[kRingSize];
};

enum class WorkerStatus : std::uint8_t { free, starting, running, exited };

// Why a worker left, for the launcher.
enum class WorkerExit : std::uint8_t {
    failed,  // by an error; start again with back-off
    stopped, // asked to by a signal; start again
    absent,  // the database has no extension
    retired, // its ordinal is no longer wanted
};

// What keeps a worker from delivering; 'ok' is none of them.
enum class Trouble : std::uint8_t {
    none,
    no_endpoint,
    cannot_record,
    turn_fails,
    endpoint_fails,
    table_locked,
};

struct Counters {
    std::atomic<std::uint64_t> turns;
    std::atomic<std::uint64_t> wal_flushes; // before sending, past asynchronous commits (G2)
    std::atomic<std::uint64_t> wakeups_commit;
    std::atomic<std::uint64_t> wakeups_poll;
    std::atomic<std::uint64_t> claimed;
    std::atomic<std::uint64_t> delivered;
    std::atomic<std::uint64_t> failed;
    std::atomic<std::uint64_t> dead;
    std::atomic<std::uint64_t> parked;
    std::atomic<std::uint64_t> log_suppressed;
};

struct WorkerSlot {
    std::atomic<Oid> database;
    std::atomic<WorkerStatus> status;
    WorkerExit exit;
    int ordinal;
    std::uint32_t generation; // tells a late starter that its slot has moved on
    int pid;
    std::atomic<Latch*> latch; // set while running
    TimestampTz launched_at;
    std::atomic<std::uint64_t> buckets; // those it serves
    std::atomic<std::uint32_t> in_flight;
    std::atomic<std::uint32_t> unrecorded;
    std::atomic<Trouble> trouble;
    std::atomic<TimestampTz> trouble_since;
    slock_t error_lock; // protects last_error
    char last_error[512];
    Counters counters;
};

struct SharedState {
    LWLock* lock;
    std::atomic<Latch*> launcher_latch;
    std::atomic<int> launcher_pid;
    std::atomic<TimestampTz> launcher_since;
    std::atomic<bool> reconcile_asked; // a database without a slot created the extension
    std::uint32_t crash_restarts;      // of the server, in a row
    TimestampTz start_workers_at;      // not before, after crashes
    DatabaseSlot databases[kMaxDatabases];
    int worker_slots;
    WorkerSlot workers[FLEXIBLE_ARRAY_MEMBER];
};

// Null when the library was not preloaded.
extern SharedState* shared;

// Requests the memory and the lock; from _PG_init under shared_preload_libraries.
void request_shared_state();

// The slot of a database, or null. Lock-free.
DatabaseSlot* find_database(Oid database);

// Tells the workers of this database that a commit inserted rows; lock-free, cannot fail. `buckets`
// are those of the rows.
void announce(DatabaseSlot* slot, std::uint32_t tag, std::int64_t lo, std::int64_t hi);
void announce_everything(DatabaseSlot* slot);
void wake_workers(Oid database, core::BucketMask buckets);
void wake_all_workers(Oid database); // also those that serve no bucket (yet)
void wake_launcher();
// CREATE or DROP EXTENSION committed in this database: its workers and the launcher look again.
void extension_changed(Oid database);

const char* trouble_name(Trouble trouble);

} // namespace outbox::pg
