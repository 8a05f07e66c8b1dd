// Every SQL statement of the relay. Each function runs inside a transaction that the caller opened
// with begin_turn(), as the table's owner, security-restricted, and may raise; the caller ends the
// transaction either way. Decides nothing about order or retries: rows go to the bridge, results
// come from it.
#pragma once

#include "pg/bridge.hpp"
#include "pg/prelude.hpp"

namespace outbox::pg {

// The extension's table as this worker found it.
struct Table {
    Oid relation;
    Oid owner;
    char schema[NAMEDATALEN];
};

enum class Found : std::uint8_t { yes, no_extension };

// Looks the table up in the catalogs. In a transaction.
Found find_table(Table* table);

enum class Begun : std::uint8_t {
    yes,
    gone,   // the table was dropped or moved: look it up again
    locked, // somebody holds or awaits a lock that conflicts with writing to it
};

// Opens SPI as the table's owner, with its lock taken without waiting. In a transaction; on
// anything but yes nothing was opened.
Begun begin_statements(Table* table);
void end_statements();

// Drops prepared statements; after an error, or when the table changed.
void forget_statements();

// --- reading ---

// The row whose payload a claim was reading; known when that raised.
struct Offender {
    bool known;
    FlatRow row;
    core::Source source;
};
extern Offender offender;

// Copies the offender's texts into the current memory context, before the transaction that read
// them is aborted.
void save_offender();
// Hands it to the bridge as an event that fails without being sent.
void admit_offender(Bridge* bridge, const char* why);

// Tells the bridge the lanes that have pending rows.
void discover_lanes(Bridge* bridge);

struct ClaimCounts {
    std::uint64_t admitted;
    std::uint64_t parked;
    std::uint64_t passed; // rows read, whatever became of them
};

// Reads ready resp. due rows and the followers of aggregates whose head is done. `factor`: workers
// that share the table.
void claim_ready(Bridge* bridge, std::size_t factor, ClaimCounts* counts);
void claim_due(Bridge* bridge, std::size_t factor, ClaimCounts* counts);
void claim_followers(Bridge* bridge, ClaimCounts* counts);

// Where the walk over aggregates with waiting rows stands.
struct OrphanWalk {
    bool running;
    char* type; // malloc'd; null: at the start
    char* id;
};
// One bounded step: aggregates whose first waiting row is parked are told to the bridge.
void walk_orphans(Bridge* bridge, OrphanWalk* walk);

// --- recording ---

// What became of one result of the batch.
enum class Recorded : std::uint8_t {
    no,
    closed,  // nothing is left to do
    waiting, // its retry is in the table
    changed, // somebody changed the row: nothing was recorded
    locked,  // somebody holds the row
    moved,   // it has a new place, noted in the result
    refused, // the row did not take the update
};

// Records the results [first, first + count) of the bridge's batch, deleting delivered rows when
// `delete_delivered`. outcomes[i] tells what became of result first + i; binding only when the
// transaction commits.
void record_results(Bridge* bridge, std::size_t first, std::size_t count, bool delete_delivered,
                    Recorded* outcomes);
// Sets retry_after = -infinity on the rows [first, first + count) of the bridge's parking list,
// where they are pending; where somebody else holds the row its aggregate is held.
void park_rows(Bridge* bridge, std::size_t first, std::size_t count);

// --- retention ---

// A row's place as one number: block * kPlacesPerBlock + offset.
constexpr std::uint64_t kPlacesPerBlock = 512;
static_assert(kPlacesPerBlock > MaxHeapTuplesPerPage);

// The place behind the table's last block.
std::uint64_t table_end(const Table& table);
// Deletes rows with from <= place < to that were delivered or discarded more than `age_s` seconds
// ago, at most `most`. Returns how many.
std::uint64_t purge_rows(std::uint64_t from, std::uint64_t to, int age_s, int most);

} // namespace outbox::pg
