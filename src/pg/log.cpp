// See log.hpp.
#include "pg/log.hpp"

#include "pg/encoding.hpp"

namespace outbox::pg {

namespace {

constexpr int kLinesPerSecond = 10;

TimestampTz second_start = 0;
int lines = 0;
std::uint64_t suppressed = 0;

// key="value" with quotes, backslashes and control characters escaped: a value cannot forge another
// key or line.
void append_pair(StringInfo line, const char* key, const std::string* value) {
    appendStringInfo(line, " %s=\"", key);
    const char* local = spellable(value->c_str());
    for (const char* c = local; *c != '\0'; ++c) {
        if (*c == '"' || *c == '\\') {
            appendStringInfoChar(line, '\\');
            appendStringInfoChar(line, *c);
        } else if (static_cast<unsigned char>(*c) < 0x20 || *c == 0x7f) {
            appendStringInfo(line, "\\x%02x", static_cast<unsigned char>(*c));
        } else {
            appendStringInfoChar(line, *c);
        }
    }
    appendStringInfoChar(line, '"');
}

void write_line(const net::Result& result) {
    StringInfoData line;
    initStringInfo(&line);
    const pg_uuid_t* id = reinterpret_cast<const pg_uuid_t*>(result.id.bytes.data());
    appendStringInfo(&line, " event_id=%s",
                     DatumGetCString(DirectFunctionCall1(uuid_out, UUIDPGetDatum(id))));
    append_pair(&line, "event_type", &result.event_type);
    append_pair(&line, "aggregate_type", &result.aggregate_type);
    append_pair(&line, "aggregate_id", &result.aggregate_id);
    appendStringInfo(&line, " attempt=%d status=%d", result.attempts, result.status);
    append_pair(&line, "error", &result.error);
    const bool dead = result.kind == net::ResultKind::dead;
    ereport(dead ? WARNING : LOG,
            (errmsg_internal("outbox: %s%s", dead ? "event is dead" : "delivery failed", line.data),
             errhidestmt(true), errhidecontext(true)));
    pfree(line.data);
}

} // namespace

void log_suppressed() {
    const TimestampTz now = GetCurrentTimestamp();
    if (now >= second_start && !TimestampDifferenceExceeds(second_start, now, 1000)) {
        return;
    }
    if (suppressed > 0) {
        ereport(LOG, (errmsg("outbox: %llu more failures were not logged",
                             static_cast<unsigned long long>(suppressed)),
                      errhidestmt(true)));
    }
    second_start = now;
    lines = 0;
    suppressed = 0;
}

bool may_log() {
    log_suppressed();
    if (lines >= kLinesPerSecond) {
        ++suppressed;
        return false;
    }
    ++lines;
    return true;
}

bool log_failure(const net::Result& result) {
    const bool logged = may_log();
    if (logged) {
        write_line(result);
    }
    return logged;
}

} // namespace outbox::pg
