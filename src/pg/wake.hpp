// The writers' side: what a transaction inserted is announced at its commit through shared memory;
// so is CREATE and DROP EXTENSION. Nothing here can fail or block a writer, except NOTIFY where
// outbox.notify asks for it.
#pragma once

namespace outbox::pg {

// Installs the transaction callback and the drop hook; from _PG_init.
void install_wake_hooks();

} // namespace outbox::pg
