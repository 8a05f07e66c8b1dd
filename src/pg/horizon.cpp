// See horizon.hpp. A synchronous commit is flushed before anyone sees it; an asynchronous one
// leaves the position to flush to in pg_xact's memory (TransactionIdGetCommitLSN), as hint bits
// need it too.
#include "pg/horizon.hpp"

namespace outbox::pg {

namespace {

constexpr int kRenewMs = 60'000;

// Every transaction before it is over and, if committed, on disk.
TransactionId horizon = InvalidTransactionId;
TimestampTz renewed_at = 0;
XLogRecPtr noted = InvalidXLogRecPtr;

// The end of WAL written so far. At a page boundary the insert position is behind the next page's
// header, where nothing can be flushed to yet.
XLogRecPtr end_of_wal() {
    const XLogRecPtr position = GetXLogInsertRecPtr();
    const XLogRecPtr in_page = position % XLOG_BLCKSZ;
    return in_page <= SizeOfXLogLongPHD ? position - in_page : position;
}

} // namespace

void renew_horizon_if_due() {
    const TimestampTz now = GetCurrentTimestamp();
    if (TransactionIdIsValid(horizon) && renewed_at <= now &&
        !TimestampDifferenceExceeds(renewed_at, now, kRenewMs)) {
        return;
    }
    const TransactionId oldest_running = GetActiveSnapshot()->xmin;
    XLogFlush(end_of_wal());
    horizon = oldest_running;
    renewed_at = now;
}

void must_be_durable(TransactionId xmin) {
    if (!TransactionIdIsNormal(xmin) || TransactionIdPrecedes(xmin, horizon) ||
        TransactionIdPrecedes(xmin, oldest_known_xid())) {
        return;
    }
    const XLogRecPtr commit = TransactionIdGetCommitLSN(xmin);
    noted = Max(noted, commit);
}

bool flush_noted_commits() {
    const XLogRecPtr target = noted;
    noted = InvalidXLogRecPtr;
    if (XLogRecPtrIsInvalid(target) || target <= GetFlushRecPtr(nullptr)) {
        return false;
    }
    XLogFlush(target);
    return true;
}

} // namespace outbox::pg
