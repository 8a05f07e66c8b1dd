-- name: InsertOutboxEvent :exec
-- Call it in the transaction that writes the business row. This is all that a service needs.
INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) VALUES ($1, $2, $3, $4);

-- name: FetchPendingEvents :many
-- For a relay of your own, like the two below it. Never run one while the extension's relay serves the same table:
-- take the database out of outbox.databases first.
SELECT id, aggregate_type, aggregate_id, event_type, payload FROM outbox_events WHERE processed_at IS NULL AND attempts < $1 ORDER BY created_at LIMIT $2 FOR UPDATE SKIP LOCKED;

-- name: MarkEventProcessed :exec
UPDATE outbox_events SET processed_at = now() WHERE id = $1;

-- name: IncrementEventAttempts :exec
UPDATE outbox_events SET attempts = attempts + 1 WHERE id = $1;

-- name: CountPendingEvents :one
-- Dead letters included: their processed_at is null as well.
SELECT count(*) FROM outbox_events WHERE processed_at IS NULL;

-- name: AcceptEvent :execrows
-- For a receiver. One row affected: handle the event. None: a duplicate.
INSERT INTO processed_events (event_id) VALUES ($1) ON CONFLICT (event_id) DO NOTHING;
