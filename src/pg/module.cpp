// The library's way in. Everything it starts is named here, nothing is done here.
#include "pg/launcher.hpp"
#include "pg/settings.hpp"
#include "pg/shared_state.hpp"
#include "pg/wake.hpp"

extern "C" {
PG_MODULE_MAGIC;
PGDLLEXPORT void _PG_init(void);
}

void _PG_init(void) {
    outbox::pg::define_settings();
    outbox::pg::install_wake_hooks();
    if (process_shared_preload_libraries_in_progress && !IsBinaryUpgrade) {
        outbox::pg::request_shared_state();
        outbox::pg::register_launcher();
    }
}
