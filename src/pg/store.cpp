// See store.hpp. The planner gets no choice (the worker switches the alternatives off), so that
// statistics from an empty table cannot turn a claim into a scan; each statement is prepared once.
#include <limits>

#include "pg/store.hpp"

#include "pg/encoding.hpp"
#include "pg/horizon.hpp"

namespace outbox::pg {

Offender offender = {};

namespace {

constexpr std::int64_t kUnixToPostgres =
    INT64CONST(946'684'800'000'000); // 1970-01-01 to 2000-01-01 in microseconds

// --- plumbing ---

enum Statement : int {
    kDiscover,
    kReady,
    kDue,
    kNextDue,
    kFollowers,
    kOrphans,
    kLock,
    kLockForDelete,
    kInspect,
    kDelivered,
    kDeliveredDelete,
    kFailed,
    kPark,
    kPurge,
    kStatements,
};

SPIPlanPtr plans[kStatements] = {};
char statement_schema[NAMEDATALEN * 2 + 3] = ""; // quoted

Oid saved_user = InvalidOid;
int saved_context = 0;
int saved_nest_level = 0;

// Columns of a claim, in this order.
#define ROW_COLUMNS                                                                                \
    "e.ctid AS tid, e.xmin AS written_by, e.xmax AS locked_by, e.id, e.aggregate_type,"            \
    " e.aggregate_id, e.event_type, e.payload, e.attempts, e.created_at, e.seq, e.headers,"        \
    " e.retry_after"

// The lowest waiting seq of the same aggregate below this row's. Ordered and limited, so that no
// plan but the index probe is possible.
#define EARLIER_WAITING                                                                            \
    "(SELECT w.seq FROM %s.outbox_events w WHERE w.processed_at IS NULL"                           \
    " AND w.retry_after < 'infinity' AND w.aggregate_type = e.aggregate_type"                      \
    " AND w.aggregate_id = e.aggregate_id AND w.seq < e.seq"                                       \
    " ORDER BY w.aggregate_type, w.aggregate_id, w.seq LIMIT 1)"

// What tells whether a row is still as it was claimed.
#define STATE_COLUMNS                                                                              \
    "e.id, e.ctid, e.processed_at IS NOT NULL, e.attempts, e.retry_after, e.headers"

// Each %s is the schema.
const char* const kSql[kStatements] = {
    // kDiscover: loose scans over the ready and the waiting index
    "WITH RECURSIVE ready(t) AS ("
    " (SELECT e.aggregate_type FROM %s.outbox_events e"
    "   WHERE e.processed_at IS NULL AND e.retry_after IS NULL"
    "   ORDER BY e.aggregate_type, e.seq LIMIT 1)"
    " UNION ALL SELECT (SELECT e.aggregate_type FROM %s.outbox_events e"
    "   WHERE e.processed_at IS NULL AND e.retry_after IS NULL AND e.aggregate_type > r.t"
    "   ORDER BY e.aggregate_type, e.seq LIMIT 1) FROM ready r WHERE r.t IS NOT NULL),"
    " waiting(t) AS ("
    " (SELECT e.aggregate_type FROM %s.outbox_events e"
    "   WHERE e.processed_at IS NULL AND e.retry_after < 'infinity'"
    "   ORDER BY e.aggregate_type, e.aggregate_id, e.seq LIMIT 1)"
    " UNION ALL SELECT (SELECT e.aggregate_type FROM %s.outbox_events e"
    "   WHERE e.processed_at IS NULL AND e.retry_after < 'infinity' AND e.aggregate_type > w.t"
    "   ORDER BY e.aggregate_type, e.aggregate_id, e.seq LIMIT 1)"
    "  FROM waiting w WHERE w.t IS NOT NULL)"
    " SELECT t FROM ready WHERE t IS NOT NULL UNION ALL SELECT t FROM waiting WHERE t IS NOT NULL",

    // kReady: $1 lanes, $2 after, $3 upto, $4 limits
    "SELECT l.i, e.*, " EARLIER_WAITING
    " FROM ROWS FROM (pg_catalog.unnest($1), pg_catalog.unnest($2), pg_catalog.unnest($3),"
    "  pg_catalog.unnest($4)) WITH ORDINALITY AS l(t, after, upto, n, i)"
    " CROSS JOIN LATERAL (SELECT " ROW_COLUMNS " FROM %s.outbox_events e"
    "  WHERE e.aggregate_type = l.t AND e.processed_at IS NULL AND e.retry_after IS NULL"
    "  AND e.seq > l.after AND e.seq <= l.upto ORDER BY e.aggregate_type, e.seq LIMIT l.n) e",

    // kDue: $1 lanes, $2 limits, $3 now
    "SELECT l.i, e.*, " EARLIER_WAITING
    " FROM ROWS FROM (pg_catalog.unnest($1), pg_catalog.unnest($2)) WITH ORDINALITY AS l(t, n, i)"
    " CROSS JOIN LATERAL (SELECT " ROW_COLUMNS " FROM %s.outbox_events e"
    "  WHERE e.aggregate_type = l.t AND e.processed_at IS NULL AND e.retry_after > '-infinity'"
    "  AND e.retry_after < 'infinity' AND e.retry_after <= $3"
    "  ORDER BY e.aggregate_type, e.retry_after, e.seq LIMIT l.n) e",

    // kNextDue: $1 lanes, $2 now
    "SELECT l.i, (SELECT e.retry_after FROM %s.outbox_events e"
    "  WHERE e.aggregate_type = l.t AND e.processed_at IS NULL AND e.retry_after > '-infinity'"
    "  AND e.retry_after < 'infinity' AND e.retry_after > $2"
    "  ORDER BY e.aggregate_type, e.retry_after, e.seq LIMIT 1)"
    " FROM pg_catalog.unnest($1) WITH ORDINALITY AS l(t, i)",

    // kFollowers: $1 lanes, $2 aggregates, $3 limit
    "SELECT l.i, e.*, NULL::pg_catalog.int8"
    " FROM ROWS FROM (pg_catalog.unnest($1), pg_catalog.unnest($2)) WITH ORDINALITY AS l(t, a, i)"
    " CROSS JOIN LATERAL (SELECT " ROW_COLUMNS " FROM %s.outbox_events e"
    "  WHERE e.aggregate_type = l.t AND e.aggregate_id = l.a AND e.processed_at IS NULL"
    "  AND e.retry_after < 'infinity'"
    "  ORDER BY e.aggregate_type, e.aggregate_id, e.seq LIMIT $3) e",

    // kOrphans: $1, $2 the aggregate to go on from, $3 limit
    "WITH RECURSIVE walk(t, a, r) AS ("
    " (SELECT e.aggregate_type, e.aggregate_id, e.retry_after FROM %s.outbox_events e"
    "   WHERE e.processed_at IS NULL AND e.retry_after < 'infinity'"
    "   AND (e.aggregate_type, e.aggregate_id) >= ($1, $2)"
    "   ORDER BY e.aggregate_type, e.aggregate_id, e.seq LIMIT 1)"
    " UNION ALL SELECT n.* FROM walk w CROSS JOIN LATERAL"
    " (SELECT e.aggregate_type, e.aggregate_id, e.retry_after FROM %s.outbox_events e"
    "   WHERE e.processed_at IS NULL AND e.retry_after < 'infinity'"
    "   AND (e.aggregate_type, e.aggregate_id) > (w.t, w.a)"
    "   ORDER BY e.aggregate_type, e.aggregate_id, e.seq LIMIT 1) n)"
    " SELECT t, a, r FROM walk LIMIT $3",

    // kLock: $1 ctids. By ctid alone, here and below: a TID scan is the only plan there is.
    "SELECT " STATE_COLUMNS " FROM %s.outbox_events e WHERE e.ctid = ANY ($1)"
    " FOR NO KEY UPDATE SKIP LOCKED",

    // kLockForDelete: the same
    "SELECT " STATE_COLUMNS " FROM %s.outbox_events e WHERE e.ctid = ANY ($1)"
    " FOR UPDATE SKIP LOCKED",

    // kInspect: $1 ids
    "SELECT " STATE_COLUMNS " FROM %s.outbox_events e WHERE e.id = ANY ($1)",

    // kDelivered: $1 ctids, locked
    "UPDATE %s.outbox_events e SET processed_at = pg_catalog.now(), retry_after = NULL"
    " WHERE e.ctid = ANY ($1) RETURNING e.id",

    // kDeliveredDelete: $1 ctids, locked
    "DELETE FROM %s.outbox_events e WHERE e.ctid = ANY ($1) RETURNING e.id",

    // kFailed: $1 ctid, locked; $2-$4 what to record
    "UPDATE %s.outbox_events e SET attempts = $2, retry_after = $3, last_error = $4"
    " WHERE e.ctid = $1 RETURNING e.id",

    // kPark: $1 ctids, locked
    "UPDATE %s.outbox_events e SET retry_after = '-infinity' WHERE e.ctid = ANY ($1)",

    // kPurge: $1 from, $2 to, $3 delivered before, $4 limit
    "DELETE FROM %s.outbox_events e WHERE e.ctid = ANY (ARRAY("
    "SELECT r.ctid FROM %s.outbox_events r"
    " WHERE r.ctid >= $1 AND r.ctid < $2 AND r.processed_at < $3 LIMIT $4"
    " FOR UPDATE SKIP LOCKED))",
};

struct ArgumentTypes {
    int count;
    Oid types[4];
};

const ArgumentTypes kArguments[kStatements] = {
    {0, {}},
    {4, {TEXTARRAYOID, INT8ARRAYOID, INT8ARRAYOID, INT8ARRAYOID}},
    {3, {TEXTARRAYOID, INT8ARRAYOID, TIMESTAMPTZOID}},
    {2, {TEXTARRAYOID, TIMESTAMPTZOID}},
    {3, {TEXTARRAYOID, TEXTARRAYOID, INT8OID}},
    {3, {TEXTOID, TEXTOID, INT8OID}},
    {1, {TIDARRAYOID}},
    {1, {TIDARRAYOID}},
    {1, {UUIDARRAYOID}},
    {1, {TIDARRAYOID}},
    {1, {TIDARRAYOID}},
    {4, {TIDOID, INT4OID, TIMESTAMPTZOID, TEXTOID}},
    {1, {TIDARRAYOID}},
    {4, {TIDOID, TIDOID, TIMESTAMPTZOID, INT8OID}},
};

// The statement with the schema in place of each %s.
char* statement_text(const char* pattern) {
    StringInfoData text;
    initStringInfo(&text);
    for (const char* at = pattern; *at != '\0'; ++at) {
        if (at[0] == '%' && at[1] == 's') {
            appendStringInfoString(&text, statement_schema);
            ++at;
        } else {
            appendStringInfoChar(&text, *at);
        }
    }
    return text.data;
}

SPIPlanPtr plan_of(Statement statement) {
    if (plans[statement] == nullptr) {
        const ArgumentTypes& arguments = kArguments[statement];
        SPIPlanPtr plan = SPI_prepare(statement_text(kSql[statement]), arguments.count,
                                      const_cast<Oid*>(arguments.types));
        if (plan == nullptr || SPI_keepplan(plan) != 0) {
            elog(ERROR, "outbox: statement %d cannot be prepared: %s", statement,
                 SPI_result_code_string(SPI_result));
        }
        plans[statement] = plan;
    }
    return plans[statement];
}

// Passes each row on as it comes; no table of results is built.
typedef bool (*RowHandler)(void* context, TupleTableSlot* slot);

struct RowReceiver {
    DestReceiver base;
    RowHandler handler;
    void* context;
};

bool receive_row(TupleTableSlot* slot, DestReceiver* self) {
    auto* receiver = reinterpret_cast<RowReceiver*>(self);
    slot_getallattrs(slot);
    return receiver->handler(receiver->context, slot);
}

void receive_start(DestReceiver* /*self*/, int /*operation*/, TupleDesc /*type*/) {}
void receive_nothing(DestReceiver* /*self*/) {}

// Runs a statement; `handler` gets each row and may end the reading by false. Returns the rows that
// the statement processed.
std::uint64_t run(Statement statement, const Datum* values, RowHandler handler, void* context) {
    const ArgumentTypes& arguments = kArguments[statement];
    SPIPlanPtr plan = plan_of(statement);
    ParamListInfo params = makeParamList(arguments.count);
    for (int i = 0; i < arguments.count; ++i) {
        params->params[i].value = values[i];
        params->params[i].isnull = false;
        params->params[i].pflags = PARAM_FLAG_CONST;
        params->params[i].ptype = arguments.types[i];
    }
    RowReceiver receiver = {};
    receiver.base.receiveSlot = receive_row;
    receiver.base.rStartup = receive_start;
    receiver.base.rShutdown = receive_nothing;
    receiver.base.rDestroy = receive_nothing;
    receiver.base.mydest = DestNone;
    receiver.handler = handler;
    receiver.context = context;
    SPIExecuteOptions options = {};
    options.params = params;
    options.dest = handler != nullptr ? &receiver.base : nullptr;
    const int code = SPI_execute_plan_extended(plan, &options);
    if (code < 0) {
        elog(ERROR, "outbox: statement %d failed: %s", statement, SPI_result_code_string(code));
    }
    return SPI_processed;
}

// --- values ---

Datum array_of(const Datum* values, std::size_t count, Oid type) {
    int16 length = 0;
    bool by_value = false;
    char align = 0;
    get_typlenbyvalalign(type, &length, &by_value, &align);
    return PointerGetDatum(construct_array(const_cast<Datum*>(values), static_cast<int>(count),
                                           type, length, by_value, align));
}

Datum* datums(std::size_t count) {
    return static_cast<Datum*>(palloc(sizeof(Datum) * Max(count, std::size_t{1})));
}

// UTF-8 to the database's encoding.
Datum text_datum(const char* data, std::size_t size) {
    char* local = pg_any_to_server(data, static_cast<int>(size), PG_UTF8);
    return PointerGetDatum(local == data ? cstring_to_text_with_len(data, static_cast<int>(size))
                                         : cstring_to_text(local));
}

Datum tid_datum(const core::RowVersion& row) {
    auto* tid = static_cast<ItemPointer>(palloc(sizeof(ItemPointerData)));
    ItemPointerSet(tid, row.block, row.offset);
    return PointerGetDatum(tid);
}

Datum uuid_datum(const core::Uuid& id) {
    auto* value = static_cast<pg_uuid_t*>(palloc(sizeof(pg_uuid_t)));
    std::memcpy(value->data, id.bytes.data(), UUID_LEN);
    return PointerGetDatum(value);
}

// The database's encoding to UTF-8; in the current memory context.
FlatText flat_text(Datum datum) {
    const text* value = DatumGetTextPP(datum);
    const int size = VARSIZE_ANY_EXHDR(value);
    const char* data = VARDATA_ANY(value);
    const char* utf8 = pg_server_to_any(data, size, PG_UTF8);
    return {utf8, utf8 == data ? static_cast<std::size_t>(size) : std::strlen(utf8)};
}

FlatText copied(FlatText text) {
    return {pnstrdup(text.data, text.size), text.size};
}

core::RowVersion row_version(Datum tid, Datum retry_after, bool retry_is_null) {
    core::RowVersion row;
    auto* pointer = reinterpret_cast<ItemPointer>(DatumGetPointer(tid));
    row.block = ItemPointerGetBlockNumberNoCheck(pointer);
    row.offset = ItemPointerGetOffsetNumberNoCheck(pointer);
    row.has_retry_after = !retry_is_null;
    row.retry_after = retry_is_null ? 0 : DatumGetTimestampTz(retry_after);
    return row;
}

// RFC 3339 has four-digit years.
bool has_rfc3339(TimestampTz at) {
    constexpr std::int64_t kYear1 = INT64CONST(-63'082'281'600'000'000);     // 0001-01-01
    constexpr std::int64_t kYear10000 = INT64CONST(252'455'616'000'000'000); // 10000-01-01
    return at >= kYear1 && at < kYear10000;
}

// --- claims ---

// Numbers of a claim's columns; l.i comes before, `earlier` after them.
enum Column : int {
    kLane,
    kTid,
    kWrittenBy,
    kLockedBy,
    kId,
    kAggregateType,
    kAggregateId,
    kEventType,
    kPayload,
    kAttempts,
    kCreatedAt,
    kSeq,
    kHeaders,
    kRetryAfter,
    kEarlier,
};

// Numbers of STATE_COLUMNS.
enum StateColumn : int {
    kStateId,
    kStateTid,
    kStateProcessed,
    kStateAttempts,
    kStateRetryAfter,
    kStateHeaders,
};

struct ReadLane {
    std::size_t rows;
    std::size_t limit;
    std::int64_t last_seq;
    bool stopped;  // a row had no room: read it again later
    bool no_room;  // stopped for a reason that passes
    bool followed; // followers: a row was admitted
};

// A claimed row that somebody had locked, or has.
struct Doubtful {
    core::RowVersion row;
    FlatText aggregate_type;
    FlatText aggregate_id;
    bool free;
};

struct Claim {
    Bridge* bridge;
    core::Source source;
    ReadLane* lanes;
    std::size_t lane_count;
    std::size_t lanes_stopped;
    MemoryContext row_memory;
    MemoryContext claim_memory;
    Doubtful* doubtful;
    std::size_t doubtful_count;
    std::size_t doubtful_room;
    ClaimCounts* counts;
};

FlatRow read_head(TupleTableSlot* slot) {
    const Datum* values = slot->tts_values;
    const bool* nulls = slot->tts_isnull;
    FlatRow row = {};
    std::memcpy(row.id, DatumGetUUIDP(values[kId])->data, UUID_LEN);
    row.aggregate_type = flat_text(values[kAggregateType]);
    row.aggregate_id = flat_text(values[kAggregateId]);
    row.event_type = flat_text(values[kEventType]);
    row.seq = DatumGetInt64(values[kSeq]);
    row.attempts = DatumGetInt32(values[kAttempts]);
    row.row = row_version(values[kTid], values[kRetryAfter], nulls[kRetryAfter]);
    const TimestampTz created_at = DatumGetTimestampTz(values[kCreatedAt]);
    row.has_created_at = has_rfc3339(created_at);
    row.created_at = row.has_created_at ? created_at + kUnixToPostgres : 0;
    row.has_earlier = !nulls[kEarlier];
    row.earlier = row.has_earlier ? DatumGetInt64(values[kEarlier]) : 0;
    return row;
}

// The key that outbox_replay() sets in headers, to "true".
constexpr const char* kReplayMark = "outbox-replay";

bool json_string_is(const JsonbValue& value, const char* text) {
    return value.val.string.len == static_cast<int>(std::strlen(text)) &&
           std::memcmp(value.val.string.val, text, std::strlen(text)) == 0;
}

FlatText flat_json_string(const JsonbValue& value) {
    const char* utf8 = pg_server_to_any(value.val.string.val, value.val.string.len, PG_UTF8);
    return {utf8, utf8 == value.val.string.val ? static_cast<std::size_t>(value.val.string.len)
                                               : std::strlen(utf8)};
}

// The headers column into the event under construction.
void read_headers(Bridge* bridge, Datum datum) {
    static const char* const kInvalid = "headers is not an object of strings";
    Jsonb* headers = DatumGetJsonbP(datum);
    if (!JB_ROOT_IS_OBJECT(headers)) {
        (void)bridge->headers_invalid(kInvalid);
        return;
    }
    JsonbIterator* iterator = JsonbIteratorInit(&headers->root);
    JsonbValue key;
    JsonbValue value;
    JsonbIteratorToken token = WJB_DONE;
    while ((token = JsonbIteratorNext(&iterator, &key, true)) != WJB_DONE) {
        if (token != WJB_KEY) {
            continue;
        }
        (void)JsonbIteratorNext(&iterator, &value, true);
        if (value.type != jbvString) {
            (void)bridge->headers_invalid(kInvalid);
            return;
        }
        if (json_string_is(key, kReplayMark) && json_string_is(value, "true")) {
            bridge->mark_replay();
        } else {
            (void)bridge->add_header(flat_json_string(key), flat_json_string(value));
        }
    }
}

FlatText read_payload(Datum datum) {
    Jsonb* payload = DatumGetJsonbP(datum);
    char* local = JsonbToCString(nullptr, &payload->root, VARSIZE(payload));
    char* utf8 = pg_server_to_any(local, static_cast<int>(std::strlen(local)), PG_UTF8);
    return {utf8, std::strlen(utf8)};
}

void remember_doubtful(Claim* claim, const FlatRow& row) {
    if (claim->doubtful_count == claim->doubtful_room) {
        claim->doubtful_room = Max(claim->doubtful_room * 2, std::size_t{16});
        const Size bytes = claim->doubtful_room * sizeof(Doubtful);
        claim->doubtful = static_cast<Doubtful*>(
            claim->doubtful == nullptr ? MemoryContextAlloc(claim->claim_memory, bytes)
                                       : repalloc(claim->doubtful, bytes));
    }
    MemoryContext before = MemoryContextSwitchTo(claim->claim_memory);
    claim->doubtful[claim->doubtful_count++] = {row.row, copied(row.aggregate_type),
                                                copied(row.aggregate_id), false};
    MemoryContextSwitchTo(before);
}

// Brings a row into memory. May raise where the payload is damaged or too large for text.
void admit(Claim* claim, const FlatRow& row, TupleTableSlot* slot) {
    Bridge* bridge = claim->bridge;
    offender = {true, row, claim->source};
    (void)bridge->begin(row);
    if (!slot->tts_isnull[kHeaders]) {
        read_headers(bridge, slot->tts_values[kHeaders]);
    }
    const FlatText payload = read_payload(slot->tts_values[kPayload]);
    offender.known = false;
    (void)bridge->admit(payload, claim->source);
    must_be_durable(DatumGetTransactionId(slot->tts_values[kWrittenBy]));
    if (TransactionIdIsValid(DatumGetTransactionId(slot->tts_values[kLockedBy]))) {
        remember_doubtful(claim, row);
    }
    ++claim->counts->admitted;
}

void stop_lane(Claim* claim, ReadLane* lane) {
    lane->stopped = true;
    ++claim->lanes_stopped;
}

// One row of a claim: take it, pass it, or end its lane here.
void take_row(Claim* claim, ReadLane* lane, TupleTableSlot* slot) {
    const FlatRow row = read_head(slot);
    switch (claim->bridge->examine(row, claim->source)) {
    case core::Admission::queued:
        if (!claim->bridge->byte_room(row.aggregate_type,
                                      toast_raw_datum_size(slot->tts_values[kPayload]))) {
            lane->no_room = true;
            stop_lane(claim, lane);
            return;
        }
        admit(claim, row, slot);
        lane->followed = true;
        break;
    case core::Admission::full:
        lane->no_room = true;
        stop_lane(claim, lane);
        return;
    case core::Admission::park:
        (void)claim->bridge->parked(row);
        ++claim->counts->parked;
        break;
    case core::Admission::known:
    case core::Admission::foreign:
    case core::Admission::held:
        break;
    }
    lane->last_seq = row.seq;
    ++lane->rows;
    ++claim->counts->passed;
}

bool on_claimed_row(void* context, TupleTableSlot* slot) {
    auto* claim = static_cast<Claim*>(context);
    ReadLane* lane = &claim->lanes[DatumGetInt64(slot->tts_values[kLane]) - 1];
    if (!lane->stopped) {
        MemoryContext before = MemoryContextSwitchTo(claim->row_memory);
        take_row(claim, lane, slot);
        MemoryContextSwitchTo(before);
        MemoryContextReset(claim->row_memory);
    }
    return claim->lanes_stopped < claim->lane_count;
}

// A follower may go only while all before it are parked: one with a retry time is a head of its
// own.
bool on_follower(void* context, TupleTableSlot* slot) {
    auto* claim = static_cast<Claim*>(context);
    const std::int64_t index = DatumGetInt64(slot->tts_values[kLane]) - 1;
    ReadLane* lane = &claim->lanes[index];
    if (lane->stopped) {
        return claim->lanes_stopped < claim->lane_count;
    }
    const auto& name = claim->bridge->follower(static_cast<std::size_t>(index));
    std::int64_t unread_after = 0;
    if (claim->bridge->unread_after(name.aggregate_type, &unread_after) &&
        DatumGetInt64(slot->tts_values[kSeq]) > unread_after) {
        lane->no_room = true; // not yet: come again
        stop_lane(claim, lane);
    } else if (!TIMESTAMP_IS_NOBEGIN(DatumGetTimestampTz(slot->tts_values[kRetryAfter]))) {
        stop_lane(claim, lane);
    }
    return on_claimed_row(context, slot);
}

Claim begin_claim(Bridge* bridge, core::Source source, std::size_t lanes, ClaimCounts* counts) {
    Claim claim = {};
    claim.bridge = bridge;
    claim.source = source;
    claim.lane_count = lanes;
    claim.lanes = static_cast<ReadLane*>(palloc0(sizeof(ReadLane) * lanes));
    claim.claim_memory = CurrentMemoryContext;
    claim.row_memory =
        AllocSetContextCreate(CurrentMemoryContext, "outbox row", ALLOCSET_DEFAULT_SIZES);
    claim.counts = counts;
    offender.known = false;
    return claim;
}

bool on_free_row(void* context, TupleTableSlot* slot) {
    auto* claim = static_cast<Claim*>(context);
    const core::RowVersion row = row_version(slot->tts_values[kStateTid], 0, true);
    for (std::size_t i = 0; i < claim->doubtful_count; ++i) {
        Doubtful& doubtful = claim->doubtful[i];
        doubtful.free =
            doubtful.free || (doubtful.row.block == row.block && doubtful.row.offset == row.offset);
    }
    return true;
}

// Of the rows that somebody locked, those still locked are let go, with all of their aggregate.
void hold_locked(Claim* claim) {
    if (claim->doubtful_count == 0) {
        return;
    }
    Datum* tids = datums(claim->doubtful_count);
    for (std::size_t i = 0; i < claim->doubtful_count; ++i) {
        tids[i] = tid_datum(claim->doubtful[i].row);
    }
    const Datum values[] = {array_of(tids, claim->doubtful_count, TIDOID)};
    run(kLock, values, on_free_row, claim);
    for (std::size_t i = 0; i < claim->doubtful_count; ++i) {
        const Doubtful& doubtful = claim->doubtful[i];
        if (!doubtful.free) {
            (void)claim->bridge->hold(doubtful.aggregate_type, doubtful.aggregate_id);
        }
    }
}

Datum lane_names(const Bridge* bridge, std::size_t lanes) {
    Datum* names = datums(lanes);
    for (std::size_t i = 0; i < lanes; ++i) {
        const LaneRead& read = bridge->read(i);
        names[i] = text_datum(read.lane.data(), read.lane.size());
    }
    return array_of(names, lanes, TEXTOID);
}

Datum limits(const Bridge* bridge, std::size_t lanes, ReadLane* into) {
    Datum* values = datums(lanes);
    for (std::size_t i = 0; i < lanes; ++i) {
        into[i].limit = bridge->read(i).limit;
        values[i] = Int64GetDatum(static_cast<std::int64_t>(into[i].limit));
    }
    return array_of(values, lanes, INT8OID);
}

} // namespace

// --- table ---

namespace {

// The schema of the extension, or InvalidOid. pg_extension has no syscache in 15.
Oid extension_schema() {
    Relation relation = table_open(ExtensionRelationId, AccessShareLock);
    ScanKeyData key;
    ScanKeyInit(&key, Anum_pg_extension_extname, BTEqualStrategyNumber, F_NAMEEQ,
                CStringGetDatum("outbox"));
    SysScanDesc scan = systable_beginscan(relation, ExtensionNameIndexId, true, nullptr, 1, &key);
    HeapTuple tuple = systable_getnext(scan);
    const Oid schema = HeapTupleIsValid(tuple)
                           ? reinterpret_cast<Form_pg_extension>(GETSTRUCT(tuple))->extnamespace
                           : InvalidOid;
    systable_endscan(scan);
    table_close(relation, AccessShareLock);
    return schema;
}

bool read_owner(Table* table) {
    HeapTuple tuple = SearchSysCache1(RELOID, ObjectIdGetDatum(table->relation));
    if (!HeapTupleIsValid(tuple)) {
        return false;
    }
    const auto* row = reinterpret_cast<Form_pg_class>(GETSTRUCT(tuple));
    char* schema = get_namespace_name(row->relnamespace);
    table->owner = row->relowner;
    const bool same = schema != nullptr && std::strcmp(schema, table->schema) == 0;
    ReleaseSysCache(tuple);
    return same;
}

} // namespace

Found find_table(Table* table) {
    *table = {};
    const Oid schema = extension_schema();
    if (!OidIsValid(schema)) {
        return Found::no_extension;
    }
    char* name = get_namespace_name(schema);
    table->relation = get_relname_relid("outbox_events", schema);
    if (name == nullptr || !OidIsValid(table->relation)) {
        return Found::no_extension;
    }
    strlcpy(table->schema, name, NAMEDATALEN);
    strlcpy(statement_schema, quote_identifier(name), sizeof(statement_schema));
    return Found::yes;
}

Begun begin_statements(Table* table) {
    if (!ConditionalLockRelationOid(table->relation, RowExclusiveLock)) {
        return Begun::locked;
    }
    if (!read_owner(table)) {
        UnlockRelationOid(table->relation, RowExclusiveLock);
        return Begun::gone;
    }
    PushActiveSnapshot(GetTransactionSnapshot());
    GetUserIdAndSecContext(&saved_user, &saved_context);
    SetUserIdAndSecContext(table->owner, saved_context | SECURITY_RESTRICTED_OPERATION);
    saved_nest_level = NewGUCNestLevel();
    if (SPI_connect() != SPI_OK_CONNECT) {
        elog(ERROR, "outbox: SPI_connect failed");
    }
    return Begun::yes;
}

void end_statements() {
    SPI_finish();
    AtEOXact_GUC(false, saved_nest_level);
    SetUserIdAndSecContext(saved_user, saved_context);
    PopActiveSnapshot();
}

void forget_statements() {
    for (SPIPlanPtr& plan : plans) {
        if (plan != nullptr) {
            SPI_freeplan(plan);
            plan = nullptr;
        }
    }
}

// --- reading ---

namespace {

bool on_lane(void* context, TupleTableSlot* slot) {
    (void)static_cast<Bridge*>(context)->discovered(flat_text(slot->tts_values[0]));
    return true;
}

} // namespace

void save_offender() {
    if (offender.known) {
        offender.row.aggregate_type = copied(offender.row.aggregate_type);
        offender.row.aggregate_id = copied(offender.row.aggregate_id);
        offender.row.event_type = copied(offender.row.event_type);
    }
}

void admit_offender(Bridge* bridge, const char* why) {
    offender.known = false;
    (void)bridge->begin(offender.row);
    (void)bridge->unreadable(why);
    (void)bridge->admit({"", 0}, offender.source);
}

void discover_lanes(Bridge* bridge) {
    run(kDiscover, nullptr, on_lane, bridge);
}

void claim_ready(Bridge* bridge, std::size_t factor, ClaimCounts* counts) {
    const std::size_t lanes = bridge->plan_ready(factor);
    if (lanes == 0) {
        return;
    }
    Claim claim = begin_claim(bridge, core::Source::ready, lanes, counts);
    Datum* after = datums(lanes);
    Datum* upto = datums(lanes);
    for (std::size_t i = 0; i < lanes; ++i) {
        after[i] = Int64GetDatum(bridge->read(i).range.after);
        upto[i] = Int64GetDatum(bridge->read(i).range.upto);
    }
    const Datum values[] = {lane_names(bridge, lanes), array_of(after, lanes, INT8OID),
                            array_of(upto, lanes, INT8OID), limits(bridge, lanes, claim.lanes)};
    run(kReady, values, on_claimed_row, &claim);
    hold_locked(&claim);
    for (std::size_t i = 0; i < lanes; ++i) {
        const ReadLane& lane = claim.lanes[i];
        if (!lane.stopped && lane.rows < lane.limit) {
            bridge->ready_read_whole(i, lane.rows > 0, lane.last_seq);
        } else if (lane.rows > 0) {
            bridge->ready_read_to(i, lane.last_seq);
        }
    }
}

namespace {

struct NextDue {
    Bridge* bridge;
    const ReadLane* lanes;
    TimestampTz now;
};

bool on_next_due(void* context, TupleTableSlot* slot) {
    auto* next = static_cast<NextDue*>(context);
    const auto index = static_cast<std::size_t>(DatumGetInt64(slot->tts_values[0]) - 1);
    const ReadLane& lane = next->lanes[index];
    if (lane.stopped || lane.rows >= lane.limit) {
        // More are due: look again soon, when there is room.
        next->bridge->due_read(index, true, next->now + 20 * core::kMillisecond);
    } else {
        const bool none = slot->tts_isnull[1];
        next->bridge->due_read(index, !none, none ? 0 : DatumGetTimestampTz(slot->tts_values[1]));
    }
    return true;
}

} // namespace

void claim_due(Bridge* bridge, std::size_t factor, ClaimCounts* counts) {
    const TimestampTz now = GetCurrentTimestamp();
    const std::size_t lanes = bridge->plan_due(now, factor);
    if (lanes == 0) {
        return;
    }
    Claim claim = begin_claim(bridge, core::Source::due, lanes, counts);
    const Datum names = lane_names(bridge, lanes);
    const Datum values[] = {names, limits(bridge, lanes, claim.lanes), TimestampTzGetDatum(now)};
    run(kDue, values, on_claimed_row, &claim);
    hold_locked(&claim);
    NextDue next = {bridge, claim.lanes, now};
    const Datum next_values[] = {names, TimestampTzGetDatum(now)};
    run(kNextDue, next_values, on_next_due, &next);
}

void claim_followers(Bridge* bridge, ClaimCounts* counts) {
    constexpr std::size_t kAggregates = 200;
    constexpr std::size_t kLimit = core::kMaxFollowers + 1;
    const std::size_t aggregates = bridge->take_followers_wanted(kAggregates);
    if (aggregates == 0) {
        return;
    }
    Claim claim = begin_claim(bridge, core::Source::parked, aggregates, counts);
    Datum* types = datums(aggregates);
    Datum* ids = datums(aggregates);
    for (std::size_t i = 0; i < aggregates; ++i) {
        const auto& name = bridge->follower(i);
        types[i] = text_datum(name.aggregate_type.data(), name.aggregate_type.size());
        ids[i] = text_datum(name.aggregate_id.data(), name.aggregate_id.size());
    }
    const Datum values[] = {array_of(types, aggregates, TEXTOID),
                            array_of(ids, aggregates, TEXTOID),
                            Int64GetDatum(static_cast<std::int64_t>(kLimit))};
    run(kFollowers, values, on_follower, &claim);
    hold_locked(&claim);
    for (std::size_t i = 0; i < aggregates; ++i) {
        const ReadLane& lane = claim.lanes[i];
        if (!lane.stopped && lane.rows < kLimit) {
            bridge->followers_read_all(i);
        } else if (lane.no_room && !lane.followed) {
            bridge->followers_not_read(i);
        } else {
            bridge->followers_read_some(i);
        }
    }
    bridge->followers_done();
}

namespace {

struct OrphanStep {
    Bridge* bridge;
    OrphanWalk* walk;
    std::size_t rows;
};

char* malloced(FlatText text) {
    auto* copy = static_cast<char*>(malloc(text.size + 1));
    if (copy == nullptr) {
        ereport(ERROR, (errcode(ERRCODE_OUT_OF_MEMORY), errmsg("out of memory")));
    }
    std::memcpy(copy, text.data, text.size);
    copy[text.size] = '\0';
    return copy;
}

bool on_waiting_aggregate(void* context, TupleTableSlot* slot) {
    auto* step = static_cast<OrphanStep*>(context);
    const FlatText type = flat_text(slot->tts_values[0]);
    const FlatText id = flat_text(slot->tts_values[1]);
    if (TIMESTAMP_IS_NOBEGIN(DatumGetTimestampTz(slot->tts_values[2]))) {
        (void)step->bridge->orphaned(type, id);
    }
    free(step->walk->type);
    free(step->walk->id);
    step->walk->type = nullptr;
    step->walk->id = nullptr;
    step->walk->type = malloced(type);
    step->walk->id = malloced(id);
    ++step->rows;
    return true;
}

} // namespace

void walk_orphans(Bridge* bridge, OrphanWalk* walk) {
    constexpr std::size_t kAggregates = 200;
    OrphanStep step = {bridge, walk, 0};
    const char* type = walk->type == nullptr ? "" : walk->type;
    const char* id = walk->id == nullptr ? "" : walk->id;
    const Datum values[] = {text_datum(type, std::strlen(type)), text_datum(id, std::strlen(id)),
                            Int64GetDatum(static_cast<std::int64_t>(kAggregates))};
    run(kOrphans, values, on_waiting_aggregate, &step);
    walk->running = step.rows == kAggregates;
    if (!walk->running) {
        free(walk->type);
        free(walk->id);
        walk->type = nullptr;
        walk->id = nullptr;
    }
}

// --- recording ---

namespace {

struct Recording {
    Bridge* bridge;
    std::size_t first;
    std::size_t count;
    Recorded* outcomes;
    bool* locked;     // by us, and as it was claimed
    std::size_t next; // where the next row's result probably is
};

net::Result& result_at(const Recording& recording, std::size_t index) {
    return recording.bridge->result(recording.first + index);
}

// The result with that id that has no outcome yet.
bool find_result(Recording* recording, const pg_uuid_t* id, std::size_t* index) {
    for (std::size_t tries = 0; tries < recording->count; ++tries) {
        const std::size_t i = (recording->next + tries) % recording->count;
        if (recording->outcomes[i] == Recorded::no &&
            std::memcmp(result_at(*recording, i).id.bytes.data(), id->data, UUID_LEN) == 0) {
            *index = i;
            recording->next = i + 1;
            return true;
        }
    }
    return false;
}

bool has_replay_mark(TupleTableSlot* slot) {
    if (slot->tts_isnull[kStateHeaders]) {
        return false;
    }
    Jsonb* headers = DatumGetJsonbP(slot->tts_values[kStateHeaders]);
    if (!JB_ROOT_IS_OBJECT(headers)) {
        return false;
    }
    JsonbValue value;
    return getKeyJsonValueFromContainer(&headers->root, kReplayMark,
                                        static_cast<int>(std::strlen(kReplayMark)),
                                        &value) != nullptr &&
           value.type == jbvString && json_string_is(value, "true");
}

// Whether nobody touched what the result is about. When the row was replayed meanwhile, the answer
// belongs to an earlier send; else a success stands whatever became of attempts and retry_after.
bool is_as_claimed(const net::Result& result, TupleTableSlot* slot) {
    const Datum* values = slot->tts_values;
    // Headers that could not be read when claimed cannot be read now.
    if (!result.unreadable && has_replay_mark(slot) != result.replay) {
        return false;
    }
    if (result.kind == net::ResultKind::delivered) {
        return true;
    }
    const core::RowVersion row = row_version(values[kStateTid], values[kStateRetryAfter],
                                             slot->tts_isnull[kStateRetryAfter]);
    return DatumGetInt32(values[kStateAttempts]) == result.attempts_before &&
           row.has_retry_after == result.row.has_retry_after &&
           row.retry_after == result.row.retry_after;
}

bool on_locked(void* context, TupleTableSlot* slot) {
    auto* recording = static_cast<Recording*>(context);
    std::size_t i = 0;
    if (!find_result(recording, DatumGetUUIDP(slot->tts_values[kStateId]), &i)) {
        return true; // another row took the place: ours is looked up by id
    }
    if (DatumGetBool(slot->tts_values[kStateProcessed])) {
        recording->outcomes[i] = Recorded::closed;
    } else if (is_as_claimed(result_at(*recording, i), slot)) {
        recording->locked[i] = true;
    } else {
        recording->outcomes[i] = Recorded::changed;
    }
    return true;
}

bool on_recorded(void* context, TupleTableSlot* slot) {
    auto* recording = static_cast<Recording*>(context);
    std::size_t i = 0;
    if (find_result(recording, DatumGetUUIDP(slot->tts_values[0]), &i)) {
        recording->outcomes[i] = result_at(*recording, i).kind == net::ResultKind::retry
                                     ? Recorded::waiting
                                     : Recorded::closed;
    }
    return true;
}

void lock_rows(Recording* recording, Statement statement) {
    Datum* tids = datums(recording->count);
    for (std::size_t i = 0; i < recording->count; ++i) {
        tids[i] = tid_datum(result_at(*recording, i).row);
    }
    const Datum values[] = {array_of(tids, recording->count, TIDOID)};
    run(statement, values, on_locked, recording);
}

void record_delivered(Recording* recording, Statement statement) {
    Datum* tids = datums(recording->count);
    std::size_t n = 0;
    for (std::size_t i = 0; i < recording->count; ++i) {
        const net::Result& result = result_at(*recording, i);
        if (recording->locked[i] && result.kind == net::ResultKind::delivered) {
            tids[n++] = tid_datum(result.row);
        }
    }
    if (n > 0) {
        const Datum values[] = {array_of(tids, n, TIDOID)};
        run(statement, values, on_recorded, recording);
    }
}

TimestampTz retry_at(const net::Result& result, TimestampTz now) {
    return result.kind == net::ResultKind::dead ? DT_NOEND : now + result.delay;
}

// One row a statement: the rate of failures is bounded by back-off.
void record_failed(Recording* recording) {
    const TimestampTz now = GetCurrentTimestamp();
    for (std::size_t i = 0; i < recording->count; ++i) {
        const net::Result& result = result_at(*recording, i);
        if (!recording->locked[i] || result.kind == net::ResultKind::delivered) {
            continue;
        }
        const TimestampTz at = retry_at(result, now);
        const Datum values[] = {tid_datum(result.row), Int32GetDatum(result.attempts),
                                TimestampTzGetDatum(at),
                                CStringGetTextDatum(spellable(result.error.c_str()))};
        run(kFailed, values, on_recorded, recording);
        if (result.kind == net::ResultKind::retry) {
            (void)recording->bridge->waits_until(
                {result.aggregate_type.data(), result.aggregate_type.size()}, at);
        }
    }
}

// A row that was not found, or not free, where it was claimed.
Recorded judge_unrecorded(net::Result& result, TupleTableSlot* slot) {
    if (DatumGetBool(slot->tts_values[kStateProcessed])) {
        return Recorded::closed;
    }
    if (!is_as_claimed(result, slot)) {
        return Recorded::changed;
    }
    const core::RowVersion now = row_version(slot->tts_values[kStateTid], 0, true);
    if (now.block == result.row.block && now.offset == result.row.offset) {
        return Recorded::locked;
    }
    result.row.block = now.block;
    result.row.offset = now.offset;
    return Recorded::moved;
}

bool on_inspected(void* context, TupleTableSlot* slot) {
    auto* recording = static_cast<Recording*>(context);
    std::size_t i = 0;
    if (find_result(recording, DatumGetUUIDP(slot->tts_values[kStateId]), &i)) {
        recording->outcomes[i] = judge_unrecorded(result_at(*recording, i), slot);
    }
    return true;
}

void inspect_unrecorded(Recording* recording) {
    Datum* ids = datums(recording->count);
    std::size_t n = 0;
    for (std::size_t i = 0; i < recording->count; ++i) {
        if (recording->outcomes[i] == Recorded::no) {
            ids[n++] = uuid_datum(result_at(*recording, i).id);
        }
    }
    if (n == 0) {
        return;
    }
    const Datum values[] = {array_of(ids, n, UUIDOID)};
    run(kInspect, values, on_inspected, recording);
    for (std::size_t i = 0; i < recording->count; ++i) {
        if (recording->outcomes[i] == Recorded::no) {
            recording->outcomes[i] = Recorded::closed; // the row is gone
        }
    }
}

} // namespace

void record_results(Bridge* bridge, std::size_t first, std::size_t count, bool delete_delivered,
                    Recorded* outcomes) {
    for (std::size_t i = 0; i < count; ++i) {
        outcomes[i] = Recorded::no;
    }
    auto* locked = static_cast<bool*>(palloc0(count + 1));
    Recording recording = {bridge, first, count, outcomes, locked, 0};
    lock_rows(&recording, delete_delivered ? kLockForDelete : kLock);
    record_delivered(&recording, delete_delivered ? kDeliveredDelete : kDelivered);
    record_failed(&recording);
    inspect_unrecorded(&recording);
    for (std::size_t i = 0; i < count; ++i) {
        if (locked[i] && outcomes[i] == Recorded::locked) {
            outcomes[i] = Recorded::refused;
        }
    }
}

namespace {

struct Parkable {
    core::RowVersion* seen; // rows that nobody else holds, by ctid
    std::size_t seen_count;
    Datum* tids; // those of them that can be parked
    std::size_t count;
};

int compare_rows(const void* a, const void* b) {
    const auto* left = static_cast<const core::RowVersion*>(a);
    const auto* right = static_cast<const core::RowVersion*>(b);
    if (left->block != right->block) {
        return left->block < right->block ? -1 : 1;
    }
    return static_cast<int>(left->offset) - static_cast<int>(right->offset);
}

bool on_parkable(void* context, TupleTableSlot* slot) {
    auto* parkable = static_cast<Parkable*>(context);
    const bool ready = slot->tts_isnull[kStateRetryAfter];
    const core::RowVersion row =
        row_version(slot->tts_values[kStateTid], slot->tts_values[kStateRetryAfter], ready);
    parkable->seen[parkable->seen_count++] = row;
    const bool pending = !DatumGetBool(slot->tts_values[kStateProcessed]);
    if (pending && (ready || !TIMESTAMP_NOT_FINITE(row.retry_after))) {
        ItemPointerSet(
            reinterpret_cast<ItemPointer>(DatumGetPointer(parkable->tids[parkable->count])),
            row.block, row.offset);
        ++parkable->count;
    }
    return true;
}

// What somebody else holds cannot be parked: it must not be overtaken once its head is done.
void hold_unparked(Bridge* bridge, std::size_t first, std::size_t count, const Parkable& parkable) {
    for (std::size_t i = first; i < first + count; ++i) {
        const auto& parking = bridge->parking(i);
        if (bsearch(&parking.row, parkable.seen, parkable.seen_count, sizeof(core::RowVersion),
                    compare_rows) == nullptr) {
            (void)bridge->hold({parking.aggregate_type.data(), parking.aggregate_type.size()},
                               {parking.aggregate_id.data(), parking.aggregate_id.size()});
        }
    }
}

} // namespace

// A row that took the place of one to park is parked in its stead: the walk over waiting aggregates
// frees it again.
void park_rows(Bridge* bridge, std::size_t first, std::size_t count) {
    if (count == 0) {
        return;
    }
    Datum* tids = datums(count);
    Parkable parkable = {};
    parkable.tids = datums(count);
    parkable.seen = static_cast<core::RowVersion*>(palloc(count * sizeof(core::RowVersion)));
    for (std::size_t i = 0; i < count; ++i) {
        tids[i] = tid_datum(bridge->parking(first + i).row);
        parkable.tids[i] = tid_datum(bridge->parking(first + i).row);
    }
    const Datum candidates[] = {array_of(tids, count, TIDOID)};
    run(kLock, candidates, on_parkable, &parkable);
    qsort(parkable.seen, parkable.seen_count, sizeof(core::RowVersion), compare_rows);
    hold_unparked(bridge, first, count, parkable);
    if (parkable.count > 0) {
        const Datum values[] = {array_of(parkable.tids, parkable.count, TIDOID)};
        run(kPark, values, nullptr, nullptr);
    }
}

// --- retention ---

namespace {

core::RowVersion row_at(std::uint64_t place) {
    core::RowVersion row;
    row.block = static_cast<BlockNumber>(place / kPlacesPerBlock);
    row.offset = static_cast<OffsetNumber>(place % kPlacesPerBlock);
    return row;
}

} // namespace

std::uint64_t table_end(const Table& table) {
    Relation relation = relation_open(table.relation, NoLock);
    const BlockNumber blocks = RelationGetNumberOfBlocks(relation);
    relation_close(relation, NoLock);
    return blocks * kPlacesPerBlock;
}

std::uint64_t purge_rows(std::uint64_t from, std::uint64_t to, int age_s, int most) {
    const TimestampTz before =
        GetCurrentTimestamp() - static_cast<std::int64_t>(age_s) * core::kSecond;
    const Datum values[] = {tid_datum(row_at(from)), tid_datum(row_at(to)),
                            TimestampTzGetDatum(before), Int64GetDatum(most)};
    return run(kPurge, values, nullptr, nullptr);
}

} // namespace outbox::pg
