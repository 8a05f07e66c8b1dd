// The launcher process: knows which databases have the extension and starts workers there; owns all
// restart policy (DESIGN 2.1). Never touches a table of a user.
#pragma once

namespace outbox::pg {

// Registers the static background worker; from _PG_init under shared_preload_libraries.
void register_launcher();

} // namespace outbox::pg
