// No ghosts (DESIGN 2.3): nothing is sent before the commit that wrote it is on disk. Knows
// transaction ids and WAL positions, not events.
#pragma once

#include "pg/prelude.hpp"

namespace outbox::pg {

// Call in each turn, with an active snapshot. Once a minute: everything that committed before is
// flushed, and older transactions need no further look.
void renew_horizon_if_due();

// A row that this transaction wrote is about to be sent.
void must_be_durable(TransactionId xmin);

// Flushes WAL past the commits noted since the last call, if it is not there yet. Outside of a
// transaction. True when it had to.
bool flush_noted_commits();

} // namespace outbox::pg
