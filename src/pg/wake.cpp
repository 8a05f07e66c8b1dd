// See wake.hpp.
#include "pg/wake.hpp"

#include "pg/settings.hpp"
#include "pg/shared_state.hpp"

extern "C" {
PGDLLEXPORT Datum notify_outbox_insert(PG_FUNCTION_ARGS);
PGDLLEXPORT Datum outbox_wake(PG_FUNCTION_ARGS);
PGDLLEXPORT Datum outbox_installed(PG_FUNCTION_ARGS);
PG_FUNCTION_INFO_V1(notify_outbox_insert);
PG_FUNCTION_INFO_V1(outbox_wake);
PG_FUNCTION_INFO_V1(outbox_installed);
}

namespace outbox::pg {

namespace {

// More lanes than this in one transaction: everything is read again.
constexpr int kMaxLanes = 8;

struct LaneRange {
    std::uint32_t tag;
    std::int64_t lo;
    std::int64_t hi;
};

// What this transaction did so far. A rolled back savepoint's share stays: one wake-up in vain.
struct Pending {
    bool extension;
    bool everything;
    int lanes;
    LaneRange lane[kMaxLanes];
    core::BucketMask buckets;
};

Pending pending = {};
object_access_hook_type previous_access_hook = nullptr;

void note_row(std::string_view type, std::string_view id, std::int64_t seq) {
    pending.buckets |= core::bucket_bit(core::bucket_of(type, id));
    const std::uint32_t tag = core::lane_tag(type);
    for (int i = 0; i < pending.lanes; ++i) {
        LaneRange& range = pending.lane[i];
        if (range.tag == tag) {
            range.lo = Min(range.lo, seq);
            range.hi = Max(range.hi, seq);
            return;
        }
    }
    if (pending.lanes == kMaxLanes) {
        pending.everything = true;
        return;
    }
    pending.lane[pending.lanes++] = {tag, seq, seq};
}

void note_everything() {
    pending.everything = true;
    pending.buckets = core::kAllBuckets;
}

void announce_pending() {
    if (pending.buckets != 0) {
        if (DatabaseSlot* slot = find_database(MyDatabaseId); slot != nullptr) {
            if (pending.everything) {
                announce_everything(slot);
            }
            for (int i = 0; i < pending.lanes && !pending.everything; ++i) {
                announce(slot, pending.lane[i].tag, pending.lane[i].lo, pending.lane[i].hi);
            }
            wake_workers(MyDatabaseId, pending.buckets);
        }
    }
    if (pending.extension) {
        extension_changed(MyDatabaseId);
    }
}

// Runs after the transaction's rows became visible. A prepared transaction commits elsewhere,
// unannounced: the safety poll finds its rows.
void on_transaction_end(XactEvent event, void* /*argument*/) {
    switch (event) {
    case XACT_EVENT_COMMIT:
    case XACT_EVENT_PARALLEL_COMMIT:
        if (shared != nullptr) {
            announce_pending();
        }
        pending = {};
        break;
    case XACT_EVENT_ABORT:
    case XACT_EVENT_PARALLEL_ABORT:
    case XACT_EVENT_PREPARE:
        pending = {};
        break;
    default:
        break;
    }
}

void on_object_access(ObjectAccessType access, Oid class_id, Oid object_id, int sub_id,
                      void* argument) {
    if (previous_access_hook != nullptr) {
        previous_access_hook(access, class_id, object_id, sub_id, argument);
    }
    if (access == OAT_DROP && class_id == ExtensionRelationId) {
        char* name = get_extension_name(object_id);
        if (name != nullptr && std::strcmp(name, "outbox") == 0) {
            pending.extension = true;
        }
    }
}

// Where the trigger finds its columns; looked up by name when the table is not the one of the last
// row.
struct Columns {
    int type;
    int id;
    int seq;
    int event_id;
};

bool is_column(TupleDesc row, int number, const char* name) {
    return number >= 1 && number <= row->natts && !TupleDescAttr(row, number - 1)->attisdropped &&
           std::strcmp(NameStr(TupleDescAttr(row, number - 1)->attname), name) == 0;
}

// 0 when there is none, or when it is of another type than the extension gave it.
int find_column(TupleDesc row, const char* name, Oid type) {
    for (int number = 1; number <= row->natts; ++number) {
        if (is_column(row, number, name)) {
            return TupleDescAttr(row, number - 1)->atttypid == type ? number : 0;
        }
    }
    return 0;
}

const Columns& columns_of(TupleDesc row) {
    static Columns columns = {};
    if (!is_column(row, columns.type, "aggregate_type") ||
        !is_column(row, columns.id, "aggregate_id") || !is_column(row, columns.seq, "seq") ||
        !is_column(row, columns.event_id, "id")) {
        columns.type = find_column(row, "aggregate_type", VARCHAROID);
        columns.id = find_column(row, "aggregate_id", VARCHAROID);
        columns.seq = find_column(row, "seq", INT8OID);
        columns.event_id = find_column(row, "id", UUIDOID);
    }
    return columns;
}

bool text_column(TupleTableSlot* slot, int number, std::string_view* value) {
    if (number == 0) {
        return false;
    }
    bool null = false;
    const Datum datum = slot_getattr(slot, number, &null);
    if (null ||
        VARATT_IS_EXTENDED(DatumGetPointer(datum)) != VARATT_IS_SHORT(DatumGetPointer(datum))) {
        return false; // compressed: not worth the work here
    }
    const auto* text_value = reinterpret_cast<const text*>(DatumGetPointer(datum));
    *value = {VARDATA_ANY(text_value), static_cast<std::size_t>(VARSIZE_ANY_EXHDR(text_value))};
    return true;
}

// Notes one inserted row. What it cannot make out it announces as "everything".
void note_inserted(TupleTableSlot* slot) {
    const Columns& columns = columns_of(slot->tts_tupleDescriptor);
    std::string_view type;
    std::string_view id;
    // The worker computes buckets and tags from UTF-8.
    if (GetDatabaseEncoding() != PG_UTF8 || columns.seq == 0 ||
        !text_column(slot, columns.type, &type) || !text_column(slot, columns.id, &id)) {
        note_everything();
        return;
    }
    bool null = false;
    const Datum seq = slot_getattr(slot, columns.seq, &null);
    if (null) {
        note_everything();
    } else {
        note_row(type, id, DatumGetInt64(seq));
    }
}

void notify_listeners(TupleTableSlot* slot) {
    const Columns& columns = columns_of(slot->tts_tupleDescriptor);
    bool null = true;
    const Datum id = columns.event_id == 0 ? Datum{0} : slot_getattr(slot, columns.event_id, &null);
    if (!null) {
        Async_Notify("outbox_event", DatumGetCString(DirectFunctionCall1(uuid_out, id)));
    }
}

} // namespace

void install_wake_hooks() {
    RegisterXactCallback(on_transaction_end, nullptr);
    previous_access_hook = object_access_hook;
    object_access_hook = on_object_access;
}

} // namespace outbox::pg

// Trigger, AFTER INSERT FOR EACH ROW.
Datum notify_outbox_insert(PG_FUNCTION_ARGS) {
    if (!CALLED_AS_TRIGGER(fcinfo)) {
        ereport(ERROR, (errcode(ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED),
                        errmsg("notify_outbox_insert() can only be called as a trigger")));
    }
    auto* trigger = reinterpret_cast<TriggerData*>(fcinfo->context);
    if (TRIGGER_FIRED_FOR_ROW(trigger->tg_event) && TRIGGER_FIRED_BY_INSERT(trigger->tg_event)) {
        if (outbox::pg::shared != nullptr) {
            outbox::pg::note_inserted(trigger->tg_trigslot);
        }
        if (outbox::pg::settings.notify) {
            outbox::pg::notify_listeners(trigger->tg_trigslot);
        }
    }
    return PointerGetDatum(nullptr);
}

// outbox_wake(): the relay looks at the whole table after this transaction's commit.
Datum outbox_wake(PG_FUNCTION_ARGS) {
    (void)fcinfo;
    outbox::pg::note_everything();
    PG_RETURN_VOID();
}

// outbox_installed(): the install script's last call.
Datum outbox_installed(PG_FUNCTION_ARGS) {
    (void)fcinfo;
    outbox::pg::pending.extension = true;
    if (outbox::pg::shared == nullptr) {
        ereport(WARNING,
                (errmsg("outbox is installed, but its relay is not running: events will wait"),
                 errdetail("The library was not loaded at server start."),
                 errhint("Add outbox to shared_preload_libraries in postgresql.conf, set "
                         "outbox.endpoint, and restart the server.")));
    }
    PG_RETURN_VOID();
}
