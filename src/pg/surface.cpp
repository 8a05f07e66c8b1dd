// The SQL-callable functions that show the relay's state from shared memory. They read, never
// write, and answer also where the library was not preloaded.
#include "pg/settings.hpp"
#include "pg/shared_state.hpp"

extern "C" {
PGDLLEXPORT Datum outbox_relay(PG_FUNCTION_ARGS);
PGDLLEXPORT Datum outbox_workers(PG_FUNCTION_ARGS);
PG_FUNCTION_INFO_V1(outbox_relay);
PG_FUNCTION_INFO_V1(outbox_workers);
}

namespace outbox::pg {

namespace {

struct Relay {
    const char* state;
    int workers;
    int in_flight;
    char last_error[sizeof(WorkerSlot::last_error)];
    TimestampTz since; // 0: unknown
};

void read_error(WorkerSlot* worker, char* text, std::size_t size) {
    SpinLockAcquire(&worker->error_lock);
    strlcpy(text, worker->last_error, size);
    SpinLockRelease(&worker->error_lock);
}

bool runs_here(const WorkerSlot& worker) {
    return worker.status.load() == WorkerStatus::running && worker.database.load() == MyDatabaseId;
}

// Adds up the workers of this database; the first trouble found names the state.
void read_workers(Relay* relay) {
    for (int i = 0; i < shared->worker_slots; ++i) {
        WorkerSlot& worker = shared->workers[i];
        if (!runs_here(worker)) {
            continue;
        }
        ++relay->workers;
        relay->in_flight += static_cast<int>(worker.in_flight.load());
        if (relay->last_error[0] == '\0') {
            read_error(&worker, relay->last_error, sizeof(relay->last_error));
        }
        const Trouble trouble = worker.trouble.load();
        if (std::strcmp(relay->state, "ok") == 0) {
            relay->state = trouble_name(trouble);
            relay->since = worker.trouble_since.load();
        }
    }
}

const char* state_without_workers(const DatabaseSlot* slot) {
    if (settings.databases[0] == '\0') {
        return "stopped by outbox.databases";
    }
    const bool wanted =
        slot == nullptr ? database_wanted(get_database_name(MyDatabaseId), false) : slot->wanted;
    if (!wanted) {
        return "database not in outbox.databases";
    }
    if (slot != nullptr && slot->no_free_slot) {
        return "no free worker slot";
    }
    return "relay not running";
}

Relay read_relay() {
    Relay relay = {"ok", 0, 0, "", 0};
    if (shared == nullptr) {
        relay.state = "not preloaded";
        return relay;
    }
    relay.since = shared->launcher_since.load();
    read_workers(&relay);
    if (relay.workers == 0) {
        const DatabaseSlot* slot = find_database(MyDatabaseId);
        relay.state = state_without_workers(slot);
        relay.since = slot == nullptr ? relay.since : slot->without_workers_since.load();
    }
    return relay;
}

Datum text_or_null(const char* text, bool* null) {
    *null = text[0] == '\0';
    return *null ? Datum{0} : CStringGetTextDatum(text);
}

const char* status_name(WorkerStatus status) {
    switch (status) {
    case WorkerStatus::free:
        return "free";
    case WorkerStatus::starting:
        return "starting";
    case WorkerStatus::running:
        return "running";
    case WorkerStatus::exited:
        return "exited";
    }
    return "unknown";
}

Datum count_datum(const std::atomic<std::uint64_t>& counter) {
    return Int64GetDatum(static_cast<std::int64_t>(counter.load()));
}

void put_worker(ReturnSetInfo* result, WorkerSlot* worker) {
    char error[sizeof(WorkerSlot::last_error)];
    read_error(worker, error, sizeof(error));
    const Counters& counters = worker->counters;
    Datum values[17];
    bool nulls[17] = {};
    int n = 0;
    values[n++] = Int32GetDatum(worker->ordinal);
    values[n++] = Int32GetDatum(worker->pid);
    values[n++] = CStringGetTextDatum(status_name(worker->status.load()));
    values[n++] = CStringGetTextDatum(trouble_name(worker->trouble.load()));
    values[n++] = TimestampTzGetDatum(worker->launched_at);
    values[n++] = Int32GetDatum(static_cast<int>(worker->in_flight.load()));
    values[n++] = Int32GetDatum(static_cast<int>(worker->unrecorded.load()));
    values[n++] = count_datum(counters.turns);
    values[n++] = count_datum(counters.wal_flushes);
    values[n++] = count_datum(counters.wakeups_commit);
    values[n++] = count_datum(counters.wakeups_poll);
    values[n++] = count_datum(counters.claimed);
    values[n++] = count_datum(counters.delivered);
    values[n++] = count_datum(counters.failed);
    values[n++] = count_datum(counters.dead);
    values[n++] = count_datum(counters.log_suppressed);
    values[n] = text_or_null(error, &nulls[n]);
    tuplestore_putvalues(result->setResult, result->setDesc, values, nulls);
}

} // namespace

} // namespace outbox::pg

// outbox_relay(): one row, the state of this database's relay.
Datum outbox_relay(PG_FUNCTION_ARGS) {
    TupleDesc type = nullptr;
    if (get_call_result_type(fcinfo, nullptr, &type) != TYPEFUNC_COMPOSITE) {
        elog(ERROR, "return type must be a row type");
    }
    const outbox::pg::Relay relay = outbox::pg::read_relay();
    Datum values[5];
    bool nulls[5] = {};
    values[0] = CStringGetTextDatum(relay.state);
    values[1] = Int32GetDatum(relay.workers);
    values[2] = Int32GetDatum(relay.in_flight);
    values[3] = outbox::pg::text_or_null(relay.last_error, &nulls[3]);
    values[4] = TimestampTzGetDatum(relay.since);
    nulls[4] = relay.since == 0;
    PG_RETURN_DATUM(HeapTupleGetDatum(heap_form_tuple(BlessTupleDesc(type), values, nulls)));
}

// outbox_workers(): a row for each worker of this database.
Datum outbox_workers(PG_FUNCTION_ARGS) {
    InitMaterializedSRF(fcinfo, 0);
    auto* result = reinterpret_cast<ReturnSetInfo*>(fcinfo->resultinfo);
    for (int i = 0; outbox::pg::shared != nullptr && i < outbox::pg::shared->worker_slots; ++i) {
        outbox::pg::WorkerSlot& worker = outbox::pg::shared->workers[i];
        if (worker.status.load() != outbox::pg::WorkerStatus::free &&
            worker.database.load() == MyDatabaseId) {
            outbox::pg::put_worker(result, &worker);
        }
    }
    return Datum{0};
}
