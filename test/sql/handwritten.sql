-- The statements of a hand-written outbox and of its relay, unchanged, by a role that has rights on the tables and no
-- others. The outbox's own relay runs in this database and leaves the rows alone: outbox.endpoint is empty.
CREATE ROLE regress_outbox_app;
GRANT SELECT, INSERT, UPDATE ON outbox_events TO regress_outbox_app;
GRANT SELECT, INSERT ON processed_events TO regress_outbox_app;
CREATE TABLE regress_orders (id int PRIMARY KEY);
GRANT SELECT, INSERT ON regress_orders TO regress_outbox_app;
SET ROLE regress_outbox_app;

-- types of parameters are inferred, as for a driver that prepares statements
PREPARE insert_event AS
    INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) VALUES ($1, $2, $3, $4);
PREPARE fetch_pending AS
    SELECT id, aggregate_type, aggregate_id, event_type, payload FROM outbox_events WHERE processed_at IS NULL AND attempts < $1 ORDER BY created_at LIMIT $2 FOR UPDATE SKIP LOCKED;
PREPARE mark_processed AS
    UPDATE outbox_events SET processed_at = now() WHERE id = $1;
PREPARE increment_attempts AS
    UPDATE outbox_events SET attempts = attempts + 1 WHERE id = $1;
PREPARE count_pending AS
    SELECT count(*) FROM outbox_events WHERE processed_at IS NULL;
PREPARE accept_event AS
    INSERT INTO processed_events (event_id) VALUES ($1) ON CONFLICT (event_id) DO NOTHING;
SELECT name, parameter_types FROM pg_prepared_statements ORDER BY name;

-- the event and the business row: both or neither
BEGIN;
INSERT INTO regress_orders VALUES (1);
EXECUTE insert_event('order', '1', 'order.created', '{"total": 10}');
COMMIT;
BEGIN;
INSERT INTO regress_orders VALUES (2);
EXECUTE insert_event('order', '2', 'order.created', '{"total": 20}');
ROLLBACK;
EXECUTE insert_event('order', '1', 'order.paid', '{"total": 10}');
EXECUTE insert_event('invoice', '7', 'invoice.sent', '["a", null, 1.50]');
EXECUTE insert_event('order', '3', 'order.created', 'null');
SELECT id FROM regress_orders;
EXECUTE count_pending;

-- what an insert of four columns leaves in the others
SELECT count(DISTINCT id) AS ids, count(DISTINCT seq) AS seqs, count(DISTINCT origin) AS origins,
       bool_and(created_at BETWEEN now() - interval '1 hour' AND now()) AS just_created
FROM outbox_events;
SELECT DISTINCT attempts, processed_at, headers, retry_after, last_error FROM outbox_events;

-- from here on ids and times are the same in every run
UPDATE outbox_events e
SET id = ('00000000-0000-0000-0000-00000000000' || o.n)::uuid, created_at = timestamptz '2024-01-01' + o.n * interval '1 s'
FROM (SELECT id, row_number() OVER (ORDER BY seq) AS n FROM outbox_events) o
WHERE o.id = e.id;

-- one turn of the relay: claim, publish, mark or count
BEGIN;
EXECUTE fetch_pending(2, 3);
EXECUTE mark_processed('00000000-0000-0000-0000-000000000001');
EXECUTE increment_attempts('00000000-0000-0000-0000-000000000002');
COMMIT;
EXECUTE count_pending;
BEGIN;
EXECUTE fetch_pending(2, 50);
EXECUTE increment_attempts('00000000-0000-0000-0000-000000000002');
COMMIT;
-- two attempts are too many
EXECUTE fetch_pending(2, 50);
EXECUTE count_pending;
-- a turn that broke off did nothing
BEGIN;
EXECUTE mark_processed('00000000-0000-0000-0000-000000000003');
ROLLBACK;
SELECT id, attempts, processed_at IS NOT NULL AS processed, retry_after, last_error FROM outbox_events ORDER BY seq;

-- the receiver's inbox
EXECUTE accept_event('00000000-0000-0000-0000-000000000001');
\echo :ROW_COUNT
EXECUTE accept_event('00000000-0000-0000-0000-000000000001');
\echo :ROW_COUNT
EXECUTE accept_event('00000000-0000-0000-0000-000000000002');
\echo :ROW_COUNT
SELECT event_id, processed_at <= now() AS dated FROM processed_events ORDER BY event_id;

-- LISTEN; outbox.notify is off by default
\o |sed 's/PID [0-9]*/PID N/'
LISTEN outbox_event;
INSERT INTO outbox_events (id, aggregate_type, aggregate_id, event_type, payload)
VALUES ('00000000-0000-0000-0000-0000000000a0', 'order', '4', 'order.created', '{}');
\o
RESET ROLE;
ALTER SYSTEM SET outbox.notify = on;
SELECT pg_reload_conf();
-- a new session has the new value
\c -
SET ROLE regress_outbox_app;
SHOW outbox.notify;
-- one notification a row, whose payload is the id; none for what is rolled back
\o |sed 's/PID [0-9]*/PID N/'
LISTEN outbox_event;
INSERT INTO outbox_events (id, aggregate_type, aggregate_id, event_type, payload)
VALUES ('00000000-0000-0000-0000-0000000000a1', 'order', '4', 'order.paid', '{}');
BEGIN;
INSERT INTO outbox_events (id, aggregate_type, aggregate_id, event_type, payload)
VALUES ('00000000-0000-0000-0000-0000000000a2', 'order', '4', 'order.lost', '{}');
ROLLBACK;
BEGIN;
INSERT INTO outbox_events (id, aggregate_type, aggregate_id, event_type, payload)
VALUES ('00000000-0000-0000-0000-0000000000a3', 'order', '4', 'order.packed', '{}'),
       ('00000000-0000-0000-0000-0000000000a4', 'order', '5', 'order.created', '{}');
SAVEPOINT s;
INSERT INTO outbox_events (id, aggregate_type, aggregate_id, event_type, payload)
VALUES ('00000000-0000-0000-0000-0000000000a5', 'order', '5', 'order.lost', '{}');
ROLLBACK TO s;
COMMIT;
-- updates notify nobody
UPDATE outbox_events SET attempts = attempts + 1;
UNLISTEN outbox_event;
\o
RESET ROLE;
ALTER SYSTEM RESET outbox.notify;
SELECT pg_reload_conf();
\c -
SHOW outbox.notify;

DELETE FROM outbox_events;
DELETE FROM processed_events;
DROP TABLE regress_orders;
DROP OWNED BY regress_outbox_app;
DROP ROLE regress_outbox_app;
