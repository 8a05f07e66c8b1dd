// The relay's lines in the server log (DESIGN 1.6): key=value, and a bounded number a second
// whatever the failure rate.
#pragma once

#include "net/delivery.hpp"
#include "pg/prelude.hpp"

namespace outbox::pg {

// Whether another line may be written in this second; if not, it is counted as suppressed.
bool may_log();

// Logs a failed or dead event. False when the line was suppressed.
bool log_failure(const net::Result& result);

// Says how many lines were suppressed, once the second is over. Call now and then.
void log_suppressed();

} // namespace outbox::pg
