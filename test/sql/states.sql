-- What a row means and what the SQL functions do with it. Everything runs in transactions that are rolled back, so the
-- relay sees none of these rows.
\set SHOW_CONTEXT never
\set VERBOSITY terse

-- the relay of this database has nothing to send to, and says so
DO $$
DECLARE
    deadline CONSTANT timestamptz := clock_timestamp() + interval '30 s';
BEGIN
    WHILE (SELECT state FROM outbox_status) IN ('ok', 'relay not running') AND clock_timestamp() < deadline LOOP
        PERFORM pg_sleep(0.05);
    END LOOP;
END
$$;
SELECT state, workers, pending, oldest_pending, dead, in_flight, last_error, since <= now() AS since FROM outbox_status;

-- --- outbox_state ------------------------------------------------------------------------------------------------

BEGIN;
-- one row for each state, the column says which
INSERT INTO outbox_events (id, aggregate_type, aggregate_id, event_type, payload, attempts, created_at, processed_at, retry_after, last_error)
SELECT ('00000000-0000-0000-0000-0000000000' || n)::uuid, 'order', expected, note, '{}', attempts,
       now() - interval '1 hour' - n * interval '1 min', processed_at, retry_after, last_error
FROM (VALUES
    (10, 'ready',     'new',                 0,   NULL::timestamptz,      NULL::timestamptz,        NULL),
    (11, 'ready',     'retry is due',        3,   NULL,                   now(),                    '500 boom'),
    (12, 'ready',     'many attempts',       100, NULL,                   NULL,                     NULL),
    (20, 'waiting',   'retry not yet due',   3,   NULL,                   now() + interval '1 day', '500 boom'),
    (21, 'waiting',   'behind an earlier',   0,   NULL,                   '-infinity',              NULL),
    (30, 'dead',      'failed for good',     10,  NULL,                   'infinity',               '500 boom'),
    (31, 'dead',      'never tried',         0,   NULL,                   'infinity',               'cannot be sent'),
    (40, 'delivered', 'at once',             0,   now(),                  NULL,                     NULL),
    (41, 'delivered', 'after retries',       2,   now(),                  now() - interval '1 s',   '500 boom'),
    (42, 'delivered', 'marked by hand',      0,   now(),                  now() + interval '1 day', NULL),
    (43, 'delivered', 'marked while behind', 0,   now(),                  '-infinity',              NULL),
    (44, 'delivered', 'long ago',            0,   '-infinity',            NULL,                     NULL),
    (50, 'discarded', 'closed by hand',      10,  now(),                  'infinity',               '500 boom')
) v (n, expected, note, attempts, processed_at, retry_after, last_error);
SELECT event_type, outbox_state(e), outbox_state(e) = aggregate_id AS as_expected FROM outbox_events e ORDER BY id;
SELECT outbox_state(NULL) IS NULL AS of_nothing;

-- dead ones, oldest first, with all columns
SELECT id, event_type, attempts, retry_after, last_error FROM outbox_dead_letters;
SELECT count(*) AS same_rows FROM (TABLE outbox_dead_letters INTERSECT TABLE outbox_events) both_;
-- ready and waiting ones are pending
SELECT pending, justify_hours(date_trunc('minute', oldest_pending)) AS oldest_pending, dead FROM outbox_status;

-- --- outbox_replay -----------------------------------------------------------------------------------------------

SELECT event_type, aggregate_id AS state, outbox_replay(id) FROM outbox_events ORDER BY id;
-- what it left alone and what it made ready, marked, with its id, age and place
SELECT id, event_type, outbox_state(e), attempts, processed_at, retry_after IS NULL AS at_once, last_error, headers,
       created_at = now() - interval '1 hour' - right(id::text, 2)::int * interval '1 min' AS same_age,
       rank() OVER (ORDER BY id) = rank() OVER (ORDER BY seq) AS same_place
FROM outbox_events e WHERE aggregate_id IN ('dead', 'delivered', 'discarded') ORDER BY id;
SELECT id, event_type, outbox_state(e), attempts, last_error, headers
FROM outbox_events e WHERE aggregate_id NOT IN ('dead', 'delivered', 'discarded') ORDER BY id;
SELECT count(*) AS dead FROM outbox_dead_letters;
-- once more: they are pending now
SELECT outbox_replay(id), count(*) FROM outbox_events GROUP BY 1;
-- nobody's event
SELECT outbox_replay('00000000-0000-0000-0000-000000000000') AS unknown, outbox_replay(NULL) AS of_null;
ROLLBACK;

BEGIN;
-- the mark joins the event's own headers; what is no object cannot be marked, nor sent
INSERT INTO outbox_events (id, aggregate_type, aggregate_id, event_type, payload, processed_at, headers)
SELECT ('00000000-0000-0000-0000-0000000000' || n)::uuid, 'order', '1', 'order.created', '{}', now(), headers
FROM (VALUES
    (10, NULL::jsonb), (11, '{}'), (12, '{"traceparent": "00-1-2-01"}'), (13, '{"outbox-replay": "false"}'),
    (20, 'null'), (21, '[]'), (22, '"text"'), (23, '1')
) v (n, headers);
SELECT bool_and(outbox_replay(id)) AS replayed FROM outbox_events;
SELECT id, outbox_state(e), headers FROM outbox_events e ORDER BY id;
ROLLBACK;

BEGIN;
-- a replay that is rolled back did not happen
INSERT INTO outbox_events (id, aggregate_type, aggregate_id, event_type, payload, retry_after)
VALUES ('00000000-0000-0000-0000-000000000001', 'order', '1', 'order.created', '{}', 'infinity');
SAVEPOINT s;
SELECT outbox_replay('00000000-0000-0000-0000-000000000001');
ROLLBACK TO s;
SELECT outbox_state(e), headers FROM outbox_events e;
-- by hand it works as well; outbox_wake spares it the wait for the safety poll
UPDATE outbox_events SET attempts = 0, retry_after = NULL;
SELECT outbox_wake();
SELECT outbox_state(e) FROM outbox_events e;
ROLLBACK;

-- --- outbox_publish ----------------------------------------------------------------------------------------------

BEGIN;
SELECT outbox_publish('order', '1', 'order.created', '{"total": 10}') AS id \gset
SELECT id = :'id' AS that_id, aggregate_type, aggregate_id, event_type, payload, headers, outbox_state(e)
FROM outbox_events e;
-- by name, with headers
SELECT outbox_publish(aggregate_type => 'order', aggregate_id => '2', event_type => 'order.created', payload => '[]',
                      headers => '{"tenant": "acme"}') AS id \gset
SELECT aggregate_id, payload, headers FROM outbox_events WHERE id = :'id';
-- names take 100 characters, not bytes
SELECT outbox_publish(repeat('é', 100), repeat('é', 100), repeat('é', 100), '{}') IS NOT NULL AS published;
-- JSON's null is a payload
SELECT outbox_publish('order', '3', 'order.created', 'null') IS NOT NULL AS published;
SELECT count(*), count(DISTINCT id) AS ids, count(DISTINCT seq) AS seqs, count(DISTINCT origin) AS origins FROM outbox_events;
ROLLBACK;
SELECT outbox_publish(repeat('x', 101), '1', 'order.created', '{}');
SELECT outbox_publish('order', repeat('x', 101), 'order.created', '{}');
SELECT outbox_publish('order', '1', repeat('x', 101), '{}');
SELECT outbox_publish(NULL, '1', 'order.created', '{}');
SELECT outbox_publish('order', NULL, 'order.created', '{}');
SELECT outbox_publish('order', '1', NULL, '{}');
SELECT outbox_publish('order', '1', 'order.created', NULL);
SELECT outbox_publish('order', '1', 'order.created', '{"total": }');
SELECT outbox_publish('order', '1', 'order.created');
SELECT count(*) FROM outbox_events;

-- the columns themselves refuse the same
INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) VALUES (repeat('x', 101), '1', 'x', '{}');
INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type) VALUES ('order', '1', 'order.created');
INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload, seq) VALUES ('order', '1', 'x', '{}', 1);
INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload, origin) VALUES ('order', '1', 'x', '{}', NULL);

-- --- the inbox ---------------------------------------------------------------------------------------------------

BEGIN;
SELECT outbox_accept('00000000-0000-0000-0000-000000000001');
SELECT outbox_accept('00000000-0000-0000-0000-000000000001');
SELECT outbox_accept('00000000-0000-0000-0000-000000000002');
SAVEPOINT refused;
SELECT outbox_accept(NULL);
ROLLBACK TO refused;
SELECT event_id, processed_at = now() AS now FROM processed_events ORDER BY event_id;
-- a receiver whose work is rolled back sees the event again
SAVEPOINT work;
SELECT outbox_accept('00000000-0000-0000-0000-000000000003');
ROLLBACK TO work;
SELECT outbox_accept('00000000-0000-0000-0000-000000000003');
ROLLBACK;
BEGIN;
SELECT outbox_accept('00000000-0000-0000-0000-000000000001');
ROLLBACK;
SELECT count(*) FROM processed_events;

-- --- the trigger function is for triggers only -------------------------------------------------------------------

SELECT notify_outbox_insert();
