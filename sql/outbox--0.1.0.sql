-- The objects of the extension outbox, version 0.1.0. Every name is qualified; functions pin their search_path.

\echo Use "CREATE EXTENSION outbox" to load this file. \quit

-- --- tables ------------------------------------------------------------------------------------------------------

CREATE TABLE @extschema@.outbox_events (
    id             uuid         NOT NULL DEFAULT pg_catalog.gen_random_uuid(),
    aggregate_type varchar(100) NOT NULL,
    aggregate_id   varchar(100) NOT NULL,
    event_type     varchar(100) NOT NULL,
    payload        jsonb        NOT NULL,
    attempts       int          NOT NULL DEFAULT 0,
    created_at     timestamptz  NOT NULL DEFAULT pg_catalog.now(),
    processed_at   timestamptz,
    seq            bigint       GENERATED ALWAYS AS IDENTITY,
    headers        jsonb,
    retry_after    timestamptz,
    last_error     text,
    origin         int          NOT NULL,
    CONSTRAINT outbox_events_pkey PRIMARY KEY (id)
) WITH (
    -- Truncation takes a lock that would make writers wait; the queue's dead rows have to go soon.
    vacuum_truncate = off,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_insert_scale_factor = 0.1,
    autovacuum_analyze_scale_factor = 0.1
);

-- The mark of this installation, the same in all its rows, another in a copy that CREATE EXTENSION made.
DO $$
BEGIN
    EXECUTE 'ALTER TABLE @extschema@.outbox_events ALTER COLUMN origin SET DEFAULT '
        || ('x' || pg_catalog.substr(pg_catalog.gen_random_uuid()::pg_catalog.text, 1, 8))::pg_catalog.bit(32)::pg_catalog.int4;
END
$$;

CREATE INDEX idx_outbox_unprocessed ON @extschema@.outbox_events (created_at)
    WHERE processed_at IS NULL;
CREATE INDEX outbox_events_ready ON @extschema@.outbox_events (aggregate_type, seq)
    WHERE processed_at IS NULL AND retry_after IS NULL;
CREATE INDEX outbox_events_due ON @extschema@.outbox_events (aggregate_type, retry_after, seq)
    WHERE processed_at IS NULL AND retry_after > '-infinity' AND retry_after < 'infinity';
CREATE INDEX outbox_events_waiting ON @extschema@.outbox_events (aggregate_type, aggregate_id, seq)
    WHERE processed_at IS NULL AND retry_after < 'infinity';
CREATE INDEX outbox_events_dead ON @extschema@.outbox_events (aggregate_type, aggregate_id, seq)
    WHERE processed_at IS NULL AND retry_after = 'infinity';

COMMENT ON TABLE @extschema@.outbox_events IS
    'Events to deliver. Insert aggregate_type, aggregate_id, event_type and payload in the transaction of the business data; the relay does the rest.';
COMMENT ON COLUMN @extschema@.outbox_events.id IS 'Event id; every send of the event carries it: the deduplication key of receivers.';
COMMENT ON COLUMN @extschema@.outbox_events.aggregate_type IS 'Kind of entity, e.g. order; names the lane.';
COMMENT ON COLUMN @extschema@.outbox_events.aggregate_id IS 'The entity; events of one (aggregate_type, aggregate_id) are sent one at a time, in seq order.';
COMMENT ON COLUMN @extschema@.outbox_events.event_type IS 'What happened, e.g. order.created.';
COMMENT ON COLUMN @extschema@.outbox_events.payload IS 'Event body; the bytes on the wire are payload::text.';
COMMENT ON COLUMN @extschema@.outbox_events.attempts IS 'Delivery attempts that failed and counted; at outbox.max_attempts the event is a dead letter.';
COMMENT ON COLUMN @extschema@.outbox_events.created_at IS 'When the event was written.';
COMMENT ON COLUMN @extschema@.outbox_events.processed_at IS 'Null: pending or dead. Set: delivered (or discarded) at that time.';
COMMENT ON COLUMN @extschema@.outbox_events.seq IS 'Order of insertion.';
COMMENT ON COLUMN @extschema@.outbox_events.headers IS 'Optional object of strings, sent as HTTP headers; outbox-replay marks an event that outbox_replay() sends again.';
COMMENT ON COLUMN @extschema@.outbox_events.retry_after IS 'Null: ready. A time: waits until then. -infinity: waits behind an earlier event of its aggregate. infinity: dead letter.';
COMMENT ON COLUMN @extschema@.outbox_events.last_error IS 'Status and first bytes of the last failing answer, or the transport error; at most 1 kB.';
COMMENT ON COLUMN @extschema@.outbox_events.origin IS 'Which installation wrote the row.';

CREATE TABLE @extschema@.processed_events (
    event_id     uuid        NOT NULL,
    processed_at timestamptz NOT NULL DEFAULT pg_catalog.now(),
    CONSTRAINT processed_events_pkey PRIMARY KEY (event_id)
);
COMMENT ON TABLE @extschema@.processed_events IS
    'Inbox of a receiver on PostgreSQL: ids of events it has handled. See outbox_accept().';
COMMENT ON COLUMN @extschema@.processed_events.event_id IS 'The event''s id, from Idempotency-Key.';
COMMENT ON COLUMN @extschema@.processed_events.processed_at IS 'When it was handled.';

SELECT pg_catalog.pg_extension_config_dump('@extschema@.outbox_events', '');
SELECT pg_catalog.pg_extension_config_dump('@extschema@.outbox_events_seq_seq', '');
SELECT pg_catalog.pg_extension_config_dump('@extschema@.processed_events', '');

-- --- trigger -----------------------------------------------------------------------------------------------------

CREATE FUNCTION @extschema@.notify_outbox_insert() RETURNS trigger
    LANGUAGE c
    AS 'MODULE_PATHNAME', 'notify_outbox_insert';
COMMENT ON FUNCTION @extschema@.notify_outbox_insert() IS
    'Trigger: wakes the relay at commit; with outbox.notify = on also sends NOTIFY outbox_event, payload the event''s id. Does nothing where the library is not preloaded.';

CREATE TRIGGER outbox_insert_notify AFTER INSERT ON @extschema@.outbox_events
    FOR EACH ROW EXECUTE FUNCTION @extschema@.notify_outbox_insert();
-- Also for rows that arrive under session_replication_role = replica.
ALTER TABLE @extschema@.outbox_events ENABLE ALWAYS TRIGGER outbox_insert_notify;
COMMENT ON TRIGGER outbox_insert_notify ON @extschema@.outbox_events IS
    'Wakes the relay at commit, also for rows that arrive under session_replication_role = replica.';

-- --- writing -----------------------------------------------------------------------------------------------------

-- The id is made here, not RETURNING: a writer needs no SELECT.
CREATE FUNCTION @extschema@.outbox_publish(
    aggregate_type pg_catalog.text, aggregate_id pg_catalog.text, event_type pg_catalog.text,
    payload pg_catalog.jsonb, headers pg_catalog.jsonb DEFAULT NULL) RETURNS pg_catalog.uuid
    LANGUAGE plpgsql VOLATILE
    SET search_path = pg_catalog, pg_temp
    AS $$
DECLARE
    event_id CONSTANT pg_catalog.uuid := pg_catalog.gen_random_uuid();
BEGIN
    INSERT INTO @extschema@.outbox_events (id, aggregate_type, aggregate_id, event_type, payload, headers)
    VALUES (event_id, $1, $2, $3, $4, $5);
    RETURN event_id;
END
$$;
COMMENT ON FUNCTION @extschema@.outbox_publish(pg_catalog.text, pg_catalog.text, pg_catalog.text, pg_catalog.jsonb, pg_catalog.jsonb) IS
    'Inserts an event with the caller''s rights and returns its id. Names take at most 100 characters; headers may be null, else an object of strings.';

-- --- states ------------------------------------------------------------------------------------------------------

CREATE FUNCTION @extschema@.outbox_state(e @extschema@.outbox_events) RETURNS pg_catalog.text
    LANGUAGE sql STABLE STRICT PARALLEL SAFE
    SET search_path = pg_catalog, pg_temp
    AS $$
    SELECT CASE
        WHEN e.processed_at IS NOT NULL AND e.retry_after = 'infinity' THEN 'discarded'
        WHEN e.processed_at IS NOT NULL THEN 'delivered'
        WHEN e.retry_after = 'infinity' THEN 'dead'
        WHEN e.retry_after IS NULL
            OR (e.retry_after > '-infinity' AND e.retry_after <= pg_catalog.statement_timestamp()) THEN 'ready'
        ELSE 'waiting'
    END
$$;
COMMENT ON FUNCTION @extschema@.outbox_state(@extschema@.outbox_events) IS
    'ready, waiting, delivered, dead or discarded.';

CREATE VIEW @extschema@.outbox_dead_letters AS
    SELECT e.*
    FROM @extschema@.outbox_events e
    WHERE e.processed_at IS NULL AND e.retry_after = 'infinity'
    ORDER BY e.created_at, e.seq;
COMMENT ON VIEW @extschema@.outbox_dead_letters IS
    'Events that failed for good, oldest first. outbox_replay(id) sends one again.';
COMMENT ON COLUMN @extschema@.outbox_dead_letters.id IS 'Event id, for outbox_replay().';
COMMENT ON COLUMN @extschema@.outbox_dead_letters.aggregate_type IS 'Kind of entity; the lane.';
COMMENT ON COLUMN @extschema@.outbox_dead_letters.aggregate_id IS 'The entity.';
COMMENT ON COLUMN @extschema@.outbox_dead_letters.event_type IS 'What happened.';
COMMENT ON COLUMN @extschema@.outbox_dead_letters.payload IS 'Event body.';
COMMENT ON COLUMN @extschema@.outbox_dead_letters.attempts IS 'Delivery attempts that failed and counted.';
COMMENT ON COLUMN @extschema@.outbox_dead_letters.created_at IS 'When the event was written.';
COMMENT ON COLUMN @extschema@.outbox_dead_letters.processed_at IS 'Null: nobody has closed the dead letter.';
COMMENT ON COLUMN @extschema@.outbox_dead_letters.seq IS 'Order of insertion.';
COMMENT ON COLUMN @extschema@.outbox_dead_letters.headers IS 'The event''s own HTTP headers.';
COMMENT ON COLUMN @extschema@.outbox_dead_letters.retry_after IS 'infinity: no retry by itself.';
COMMENT ON COLUMN @extschema@.outbox_dead_letters.last_error IS 'Why it failed the last time.';
COMMENT ON COLUMN @extschema@.outbox_dead_letters.origin IS 'Which installation wrote the row.';

-- --- operating ---------------------------------------------------------------------------------------------------

CREATE FUNCTION @extschema@.outbox_wake() RETURNS void
    LANGUAGE c VOLATILE
    AS 'MODULE_PATHNAME', 'outbox_wake';
COMMENT ON FUNCTION @extschema@.outbox_wake() IS
    'After this transaction''s commit the relay looks at the whole table at once, instead of at its next safety poll: for use after changing rows by hand.';

CREATE FUNCTION @extschema@.outbox_replay(id pg_catalog.uuid) RETURNS pg_catalog.bool
    LANGUAGE plpgsql VOLATILE SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp
    AS $$
BEGIN
    UPDATE @extschema@.outbox_events e
    SET processed_at = NULL, attempts = 0, retry_after = NULL, last_error = NULL,
        headers = CASE
            WHEN e.headers IS NULL THEN '{"outbox-replay": "true"}'
            WHEN pg_catalog.jsonb_typeof(e.headers) = 'object' THEN e.headers || '{"outbox-replay": "true"}'
            ELSE e.headers
        END
    WHERE e.id = $1 AND (e.processed_at IS NOT NULL OR e.retry_after = 'infinity');
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM @extschema@.outbox_wake();
    RETURN true;
END
$$;
COMMENT ON FUNCTION @extschema@.outbox_replay(pg_catalog.uuid) IS
    'Sends a dead, discarded or delivered event again, with the same id and the header outbox-replay: true. False for a pending or unknown one; null gives false.';

CREATE FUNCTION @extschema@.outbox_relay(
    OUT state pg_catalog.text, OUT workers pg_catalog.int4, OUT in_flight pg_catalog.int4,
    OUT last_error pg_catalog.text, OUT since pg_catalog.timestamptz)
    LANGUAGE c VOLATILE
    AS 'MODULE_PATHNAME', 'outbox_relay';
COMMENT ON FUNCTION @extschema@.outbox_relay() IS
    'State of this database''s relay from shared memory: ok, or what keeps it from delivering; since is null where nothing is known.';

CREATE FUNCTION @extschema@.outbox_workers(
    OUT ordinal pg_catalog.int4, OUT pid pg_catalog.int4, OUT status pg_catalog.text, OUT state pg_catalog.text,
    OUT started_at pg_catalog.timestamptz, OUT in_flight pg_catalog.int4, OUT unrecorded pg_catalog.int4,
    OUT turns pg_catalog.int8, OUT wal_flushes pg_catalog.int8,
    OUT wakeups_commit pg_catalog.int8, OUT wakeups_poll pg_catalog.int8, OUT claimed pg_catalog.int8,
    OUT delivered pg_catalog.int8, OUT failed pg_catalog.int8, OUT dead pg_catalog.int8,
    OUT log_suppressed pg_catalog.int8, OUT last_error pg_catalog.text)
    RETURNS SETOF pg_catalog.record
    LANGUAGE c VOLATILE
    AS 'MODULE_PATHNAME', 'outbox_workers';
COMMENT ON FUNCTION @extschema@.outbox_workers() IS
    'A row for each worker process of this database, with its counters since its start. wal_flushes: turns that had to flush WAL before sending.';

CREATE VIEW @extschema@.outbox_status AS
    SELECT r.state, r.workers, p.pending, p.oldest_pending, d.dead, r.in_flight, r.last_error, r.since
    FROM @extschema@.outbox_relay() r
    CROSS JOIN (
        SELECT pg_catalog.count(*) AS pending,
               pg_catalog.clock_timestamp() - pg_catalog.min(e.created_at)
                   FILTER (WHERE pg_catalog.isfinite(e.created_at)) AS oldest_pending
        FROM @extschema@.outbox_events e
        WHERE e.processed_at IS NULL AND (e.retry_after IS NULL OR e.retry_after < 'infinity')) p
    CROSS JOIN (
        SELECT pg_catalog.count(*) AS dead
        FROM @extschema@.outbox_events e
        WHERE e.processed_at IS NULL AND e.retry_after = 'infinity') d;
COMMENT ON VIEW @extschema@.outbox_status IS
    'One row: state (ok, or the cause why events wait), workers, pending, oldest_pending (age), dead, in_flight, last_error, since.';
COMMENT ON COLUMN @extschema@.outbox_status.state IS 'ok, or the cause why events wait.';
COMMENT ON COLUMN @extschema@.outbox_status.workers IS 'Worker processes of this database that are running.';
COMMENT ON COLUMN @extschema@.outbox_status.pending IS 'Events that are ready or waiting.';
COMMENT ON COLUMN @extschema@.outbox_status.oldest_pending IS 'Age of the oldest pending event; null when there is none.';
COMMENT ON COLUMN @extschema@.outbox_status.dead IS 'Dead letters.';
COMMENT ON COLUMN @extschema@.outbox_status.in_flight IS 'Requests that wait for their answer.';
COMMENT ON COLUMN @extschema@.outbox_status.last_error IS 'The last failure that a worker met.';
COMMENT ON COLUMN @extschema@.outbox_status.since IS 'Since when state is what it is; null where nothing is known.';

-- --- inbox -------------------------------------------------------------------------------------------------------

CREATE FUNCTION @extschema@.outbox_accept(event_id pg_catalog.uuid) RETURNS pg_catalog.bool
    LANGUAGE plpgsql VOLATILE SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp
    AS $$
BEGIN
    INSERT INTO @extschema@.processed_events (event_id) VALUES ($1)
    ON CONFLICT ON CONSTRAINT processed_events_pkey DO NOTHING;
    RETURN FOUND;
END
$$;
COMMENT ON FUNCTION @extschema@.outbox_accept(pg_catalog.uuid) IS
    'For receivers: true the first time an event id is seen, false for a duplicate. Call it in the transaction that handles the event: when that rolls back, the event was not seen. Null is an error.';

-- --- privileges --------------------------------------------------------------------------------------------------

REVOKE ALL ON TABLE @extschema@.outbox_events, @extschema@.processed_events,
    @extschema@.outbox_dead_letters, @extschema@.outbox_status FROM PUBLIC;

REVOKE ALL ON FUNCTION
    @extschema@.notify_outbox_insert(),
    @extschema@.outbox_publish(pg_catalog.text, pg_catalog.text, pg_catalog.text, pg_catalog.jsonb, pg_catalog.jsonb),
    @extschema@.outbox_state(@extschema@.outbox_events),
    @extschema@.outbox_wake(),
    @extschema@.outbox_replay(pg_catalog.uuid),
    @extschema@.outbox_relay(),
    @extschema@.outbox_workers(),
    @extschema@.outbox_accept(pg_catalog.uuid)
    FROM PUBLIC;
GRANT SELECT ON @extschema@.outbox_status TO pg_monitor;
GRANT EXECUTE ON FUNCTION @extschema@.outbox_relay(), @extschema@.outbox_workers() TO pg_monitor;

-- --- the relay starts at the commit ------------------------------------------------------------------------------

CREATE FUNCTION @extschema@.outbox_installed() RETURNS void
    LANGUAGE c VOLATILE
    AS 'MODULE_PATHNAME', 'outbox_installed';
SELECT @extschema@.outbox_installed();
DROP FUNCTION @extschema@.outbox_installed();
