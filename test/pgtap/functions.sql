-- What the SQL functions, the views and the trigger do, in the caller's transaction. Nothing here is committed, so
-- what the relay makes of it is for test/t.
BEGIN;
SELECT plan(82);

CREATE FUNCTION pg_temp.event(n int) RETURNS uuid LANGUAGE sql
    AS $$ SELECT ('00000000-0000-0000-0000-' || lpad(n::text, 12, '0'))::uuid $$;
CREATE ROLE outbox_test_writer;
CREATE ROLE outbox_test_stranger;

-- --- outbox_state ------------------------------------------------------------------------------------------------

CREATE FUNCTION pg_temp.state(processed_at timestamptz, retry_after timestamptz) RETURNS text LANGUAGE sql AS $$
    SELECT outbox_state(e) FROM jsonb_populate_record(NULL::outbox_events,
        jsonb_build_object('processed_at', processed_at, 'retry_after', retry_after)) e
$$;
SELECT is(pg_temp.state(NULL, NULL), 'ready', 'state: nothing set');
SELECT is(pg_temp.state(NULL, now()), 'ready', 'state: retry due now');
SELECT is(pg_temp.state(NULL, '2000-01-01'), 'ready', 'state: retry due long ago');
SELECT is(pg_temp.state(NULL, now() + interval '1 hour'), 'waiting', 'state: retry not yet due');
SELECT is(pg_temp.state(NULL, '294276-12-31'), 'waiting', 'state: retry due at the end of time');
SELECT is(pg_temp.state(NULL, '-infinity'), 'waiting', 'state: behind an earlier event');
SELECT is(pg_temp.state(NULL, 'infinity'), 'dead', 'state: failed for good');
SELECT is(pg_temp.state(now(), NULL), 'delivered', 'state: processed');
SELECT is(pg_temp.state(now(), now() + interval '1 hour'), 'delivered', 'state: processed while waiting');
SELECT is(pg_temp.state(now(), '-infinity'), 'delivered', 'state: processed while behind an earlier event');
SELECT is(pg_temp.state('infinity', NULL), 'delivered', 'state: processed at no real time');
SELECT is(pg_temp.state(now(), 'infinity'), 'discarded', 'state: a dead letter that was closed');
SELECT is(outbox_state(NULL), NULL, 'state: of no event');

-- the indexes' predicates and the states cut the same way, except that what is due counts as ready
SELECT is_empty(
    $$ SELECT r FROM unnest(ARRAY['-infinity', '2000-01-01', '294276-12-31', 'infinity', NULL]::timestamptz[]) r
       WHERE (pg_temp.state(NULL, r) = 'dead') IS DISTINCT FROM coalesce(r = 'infinity', false)
          OR (pg_temp.state(NULL, r) IN ('ready', 'waiting')) IS DISTINCT FROM (r IS NULL OR r < 'infinity') $$,
    'state: dead, or else pending');

-- --- outbox_publish ----------------------------------------------------------------------------------------------

CREATE TEMP TABLE published AS
    SELECT outbox_publish('order', '1', 'order.created', '{"total": 10}') AS id;
SELECT results_eq(
    $$ SELECT aggregate_type::text, aggregate_id::text, event_type::text, payload, headers, attempts, created_at = now(),
              processed_at, retry_after, last_error FROM outbox_events JOIN published USING (id) $$,
    $$ VALUES ('order', '1', 'order.created', '{"total": 10}'::jsonb, NULL::jsonb, 0, true,
              NULL::timestamptz, NULL::timestamptz, NULL::text) $$,
    'publish: the row with the id that it returned');
SELECT outbox_publish('order', '1', 'order.paid', '{}', '{"tenant": "acme"}') AS id \gset
SELECT is((SELECT headers FROM outbox_events WHERE id = :'id'), '{"tenant": "acme"}', 'publish: headers');
SELECT lives_ok(
    $$ SELECT outbox_publish(headers => NULL, payload => '1', event_type => 'e', aggregate_id => 'i', aggregate_type => 't') $$,
    'publish: names of the arguments');
SELECT is((SELECT count(DISTINCT outbox_publish('order', '1', 'numbered', to_jsonb(n))) FROM generate_series(1, 20) n), 20::bigint,
          'publish: an id of its own for each event');
SELECT results_eq(
    $$ SELECT payload::int FROM outbox_events WHERE event_type = 'numbered' ORDER BY seq $$,
    $$ SELECT generate_series(1, 20) $$, 'publish: seq follows the order of the calls');
SELECT is((SELECT count(DISTINCT origin) FROM outbox_events), 1::bigint, 'publish: one origin');

SELECT lives_ok($$ SELECT outbox_publish(repeat('ü', 100), repeat('ü', 100), repeat('ü', 100), '{}') $$, 'publish: names of 100 characters');
SELECT throws_ok($$ SELECT outbox_publish(repeat('x', 101), '1', 'e', '{}') $$, '22001', NULL, 'publish: aggregate_type too long');
SELECT throws_ok($$ SELECT outbox_publish('order', repeat('x', 101), 'e', '{}') $$, '22001', NULL, 'publish: aggregate_id too long');
SELECT throws_ok($$ SELECT outbox_publish('order', '1', repeat('x', 101), '{}') $$, '22001', NULL, 'publish: event_type too long');
SELECT throws_ok($$ SELECT outbox_publish(NULL, '1', 'e', '{}') $$, '23502', NULL, 'publish: no aggregate_type');
SELECT throws_ok($$ SELECT outbox_publish('order', NULL, 'e', '{}') $$, '23502', NULL, 'publish: no aggregate_id');
SELECT throws_ok($$ SELECT outbox_publish('order', '1', NULL, '{}') $$, '23502', NULL, 'publish: no event_type');
SELECT throws_ok($$ SELECT outbox_publish('order', '1', 'e', NULL) $$, '23502', NULL, 'publish: no payload');
SELECT lives_ok($$ SELECT outbox_publish('order', '1', 'e', 'null') $$, 'publish: JSON null is a payload');
SELECT lives_ok($$ SELECT outbox_publish('order', '1', 'e', jsonb_build_object('x', repeat('x', 1000000))) $$, 'publish: a payload of a megabyte');

-- with the caller's rights
CREATE FUNCTION pg_temp.as_role(role text, command text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE format('SET LOCAL ROLE %I', role);
    EXECUTE command;
    RESET ROLE;
END
$$;
SELECT throws_ok($$ SELECT pg_temp.as_role('outbox_test_stranger', 'SELECT outbox_publish(''t'', ''i'', ''e'', ''{}'')') $$, '42501',
                 'permission denied for function outbox_publish', 'publish: not for PUBLIC');
GRANT EXECUTE ON FUNCTION outbox_publish TO outbox_test_stranger, outbox_test_writer;
SELECT throws_ok($$ SELECT pg_temp.as_role('outbox_test_stranger', 'SELECT outbox_publish(''t'', ''i'', ''e'', ''{}'')') $$, '42501',
                 'permission denied for table outbox_events', 'publish: not without INSERT');
GRANT INSERT ON outbox_events TO outbox_test_writer;
SELECT lives_ok($$ SELECT pg_temp.as_role('outbox_test_writer', 'SELECT outbox_publish(''t'', ''i'', ''by a writer'', ''{}'')') $$,
                'publish: with INSERT and nothing else');
SELECT is((SELECT count(*) FROM outbox_events WHERE event_type = 'by a writer'), 1::bigint, 'publish: the writer''s event is there');

-- --- outbox_replay -----------------------------------------------------------------------------------------------

DELETE FROM outbox_events;
INSERT INTO outbox_events (id, aggregate_type, aggregate_id, event_type, payload, attempts, processed_at, retry_after, last_error, headers)
VALUES
    (pg_temp.event(1), 'order', '1', 'ready',     '{}', 0,  NULL,  NULL,                      NULL,       NULL),
    (pg_temp.event(2), 'order', '1', 'due',       '{}', 2,  NULL,  '2000-01-01',              '500 boom', NULL),
    (pg_temp.event(3), 'order', '1', 'waiting',   '{}', 2,  NULL,  now() + interval '1 hour', '500 boom', NULL),
    (pg_temp.event(4), 'order', '1', 'parked',    '{}', 0,  NULL,  '-infinity',               NULL,       NULL),
    (pg_temp.event(5), 'order', '1', 'dead',      '{}', 10, NULL,  'infinity',                '500 boom', NULL),
    (pg_temp.event(6), 'order', '1', 'delivered', '{}', 2,  now(), '2000-01-01',              '500 boom', '{"tenant": "acme"}'),
    (pg_temp.event(7), 'order', '1', 'discarded', '{}', 10, now(), 'infinity',                '500 boom', NULL),
    (pg_temp.event(8), 'order', '1', 'unmarked',  '{}', 10, now(), NULL,                      NULL,       '["x"]'),
    (pg_temp.event(9), 'order', '1', 'bystander', '{}', 10, now(), 'infinity',                '500 boom', NULL);
CREATE TEMP TABLE before AS SELECT * FROM outbox_events;

SELECT is(outbox_replay(pg_temp.event(1)), false, 'replay: not of a ready event');
SELECT is(outbox_replay(pg_temp.event(2)), false, 'replay: not of one whose retry is due');
SELECT is(outbox_replay(pg_temp.event(3)), false, 'replay: not of a waiting one');
SELECT is(outbox_replay(pg_temp.event(4)), false, 'replay: not of one behind another');
SELECT is(outbox_replay(pg_temp.event(0)), false, 'replay: not of an unknown one');
SELECT is(outbox_replay(NULL), false, 'replay: not of none');
SELECT is(outbox_replay(pg_temp.event(5)), true, 'replay: of a dead letter');
SELECT is(outbox_replay(pg_temp.event(6)), true, 'replay: of a delivered event');
SELECT is(outbox_replay(pg_temp.event(7)), true, 'replay: of a discarded event');
SELECT is(outbox_replay(pg_temp.event(8)), true, 'replay: of an event with headers that cannot be marked');
SELECT is(outbox_replay(pg_temp.event(5)), false, 'replay: not twice');
SELECT results_eq(
    $$ SELECT id, outbox_state(e), attempts, processed_at, retry_after, last_error, headers
       FROM outbox_events e WHERE id BETWEEN pg_temp.event(5) AND pg_temp.event(8) ORDER BY id $$,
    $$ VALUES
        (pg_temp.event(5), 'ready', 0, NULL::timestamptz, NULL::timestamptz, NULL::text, '{"outbox-replay": "true"}'::jsonb),
        (pg_temp.event(6), 'ready', 0, NULL, NULL, NULL, '{"tenant": "acme", "outbox-replay": "true"}'),
        (pg_temp.event(7), 'ready', 0, NULL, NULL, NULL, '{"outbox-replay": "true"}'),
        (pg_temp.event(8), 'ready', 0, NULL, NULL, NULL, '["x"]') $$,
    'replay: starts afresh, marked');
SELECT results_eq(
    $$ SELECT id, aggregate_type, aggregate_id, event_type, payload, created_at, seq, origin FROM outbox_events ORDER BY id $$,
    $$ SELECT id, aggregate_type, aggregate_id, event_type, payload, created_at, seq, origin FROM before ORDER BY id $$,
    'replay: as the same event in the same place');
SELECT results_eq(
    $$ SELECT * FROM outbox_events WHERE id NOT BETWEEN pg_temp.event(5) AND pg_temp.event(8) ORDER BY id $$,
    $$ SELECT * FROM before WHERE id NOT BETWEEN pg_temp.event(5) AND pg_temp.event(8) ORDER BY id $$,
    'replay: touches no other event');
SELECT throws_ok($$ SELECT pg_temp.as_role('outbox_test_writer', 'SELECT outbox_replay(NULL)') $$, '42501',
                 'permission denied for function outbox_replay', 'replay: not for a writer');
GRANT EXECUTE ON FUNCTION outbox_replay TO outbox_test_stranger;
SELECT lives_ok($$ SELECT pg_temp.as_role('outbox_test_stranger', 'SELECT outbox_replay(''' || pg_temp.event(9) || ''')') $$,
                'replay: for a role that may call it and nothing else');
SELECT is((SELECT outbox_state(e) FROM outbox_events e WHERE id = pg_temp.event(9)), 'ready', 'replay: its event is ready');

-- --- outbox_accept -----------------------------------------------------------------------------------------------

SELECT is(outbox_accept(pg_temp.event(1)), true, 'accept: the first time');
SELECT is(outbox_accept(pg_temp.event(1)), false, 'accept: a duplicate');
SELECT is(outbox_accept(pg_temp.event(2)), true, 'accept: another event');
SELECT throws_ok('SELECT outbox_accept(NULL)', '23502', NULL, 'accept: no event is an error, not a duplicate');
SELECT results_eq(
    $$ SELECT * FROM processed_events ORDER BY event_id $$,
    $$ VALUES (pg_temp.event(1), now()), (pg_temp.event(2), now()) $$, 'accept: remembered, with the time');
SAVEPOINT work;
SELECT is(outbox_accept(pg_temp.event(3)), true, 'accept: in a subtransaction');
ROLLBACK TO work;
SELECT is(outbox_accept(pg_temp.event(3)), true, 'accept: again, for it was rolled back');
INSERT INTO processed_events (event_id) VALUES (pg_temp.event(4));
SELECT is(outbox_accept(pg_temp.event(4)), false, 'accept: a duplicate of what was inserted by hand');
SELECT throws_ok($$ SELECT pg_temp.as_role('outbox_test_stranger', 'SELECT outbox_accept(''' || pg_temp.event(5) || ''')') $$, '42501',
                 'permission denied for function outbox_accept', 'accept: not for PUBLIC');
GRANT EXECUTE ON FUNCTION outbox_accept TO outbox_test_stranger;
SELECT lives_ok($$ SELECT pg_temp.as_role('outbox_test_stranger', 'SELECT outbox_accept(''' || pg_temp.event(5) || ''')') $$,
                'accept: for a role that may call it and nothing else');
SELECT is(outbox_accept(pg_temp.event(5)), false, 'accept: that role''s event is remembered');

-- --- nobody's search_path leads a function astray ----------------------------------------------------------------

CREATE TEMP TABLE outbox_events (LIKE outbox_events INCLUDING ALL);
CREATE TEMP TABLE processed_events (LIKE processed_events INCLUDING ALL);
CREATE FUNCTION pg_temp.gen_random_uuid() RETURNS uuid LANGUAGE sql AS $$ SELECT '00000000-0000-0000-0000-000000000bad'::uuid $$;
SELECT lives_ok($$ SELECT outbox_publish('order', '1', 'astray?', '{}'), outbox_accept(pg_temp.event(6)), outbox_replay(pg_temp.event(6)) $$,
                'functions work where the caller has tables of the same names');
SELECT is((SELECT count(*) FROM pg_temp.outbox_events), 0::bigint, 'publish: not into the caller''s table');
SELECT is((SELECT count(*) FROM pg_temp.processed_events), 0::bigint, 'accept: not into the caller''s table');
DROP TABLE pg_temp.outbox_events, pg_temp.processed_events;
SELECT isnt((SELECT id FROM outbox_events WHERE event_type = 'astray?'), '00000000-0000-0000-0000-000000000bad',
            'publish: nor with the caller''s functions');

-- --- views -------------------------------------------------------------------------------------------------------

DELETE FROM outbox_events;
SELECT results_eq($$ SELECT pending, oldest_pending, dead FROM outbox_status $$,
                  $$ VALUES (0::bigint, NULL::interval, 0::bigint) $$, 'status: no events');
SELECT is((SELECT count(*) FROM outbox_dead_letters), 0::bigint, 'dead letters: no events');
INSERT INTO outbox_events (id, aggregate_type, aggregate_id, event_type, payload, created_at, processed_at, retry_after)
VALUES
    (pg_temp.event(1), 'order', '1', 'ready',     '{}', now() - interval '1 hour',  NULL,  NULL),
    (pg_temp.event(2), 'order', '1', 'waiting',   '{}', now() - interval '2 hours', NULL,  now() + interval '1 hour'),
    (pg_temp.event(3), 'order', '1', 'parked',    '{}', now() - interval '3 hours', NULL,  '-infinity'),
    (pg_temp.event(4), 'order', '1', 'dead',      '{}', now() - interval '4 hours', NULL,  'infinity'),
    (pg_temp.event(5), 'order', '1', 'dead too',  '{}', now() - interval '5 hours', NULL,  'infinity'),
    (pg_temp.event(6), 'order', '1', 'same age',  '{}', now() - interval '5 hours', NULL,  'infinity'),
    (pg_temp.event(7), 'order', '1', 'delivered', '{}', now() - interval '6 hours', now(), NULL),
    (pg_temp.event(8), 'order', '1', 'discarded', '{}', now() - interval '7 hours', now(), 'infinity');
SELECT results_eq($$ SELECT pending, date_trunc('hour', oldest_pending), dead FROM outbox_status $$,
                  $$ VALUES (3::bigint, interval '3 hours', 3::bigint) $$, 'status: pending without dead ones, and the oldest of them');
SELECT results_eq($$ SELECT event_type::text FROM outbox_dead_letters $$, $$ VALUES ('dead too'), ('same age'), ('dead') $$,
                  'dead letters: oldest first, then by seq');
INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload, created_at)
VALUES ('order', '1', 'e', '{}', '-infinity'), ('order', '1', 'e', '{}', 'infinity');
SELECT results_eq($$ SELECT pending, date_trunc('hour', oldest_pending) FROM outbox_status $$,
                  $$ VALUES (5::bigint, interval '3 hours') $$, 'status: bears infinite times');
SELECT is((SELECT count(*) FROM outbox_status), 1::bigint, 'status: one row');
SELECT is((SELECT count(*) FROM outbox_relay() WHERE state <> '' AND workers >= 0 AND in_flight >= 0), 1::bigint, 'relay: one row');
SELECT is_empty($$ SELECT * FROM outbox_workers() WHERE ordinal IS NULL OR status IS NULL OR state IS NULL OR started_at > clock_timestamp() $$,
                'workers: rows with who and what');

-- --- the trigger never stands in the way -------------------------------------------------------------------------

SELECT lives_ok(
    $$ INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
       SELECT 'type ' || n, repeat('é', 100), 'e', '{}' FROM generate_series(1, 1000) n $$,
    'trigger: a thousand types in one statement');
SET LOCAL session_replication_role = replica;
SELECT lives_ok($$ INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) VALUES ('t', 'i', 'e', '{}') $$,
                'trigger: under session_replication_role = replica');
SET LOCAL session_replication_role = origin;
ALTER TABLE outbox_events ADD COLUMN added int, ADD COLUMN added_too text DEFAULT 'x';
SELECT lives_ok($$ INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) VALUES ('t', 'i', 'e', '{}') $$,
                'trigger: with columns that were added');
ALTER TABLE outbox_events DROP COLUMN added;
SELECT lives_ok($$ INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) VALUES ('t', 'i', 'e', '{}') $$,
                'trigger: with a column that is gone');
CREATE TEMP TABLE other (seq text, id int, aggregate_type bytea);
CREATE TRIGGER on_insert AFTER INSERT ON other FOR EACH ROW EXECUTE FUNCTION notify_outbox_insert();
CREATE TRIGGER on_update BEFORE UPDATE ON other FOR EACH ROW EXECUTE FUNCTION notify_outbox_insert();
CREATE TRIGGER on_statement AFTER INSERT OR DELETE ON other FOR EACH STATEMENT EXECUTE FUNCTION notify_outbox_insert();
SELECT lives_ok($$ INSERT INTO other VALUES ('x', 1, 'x'), (NULL, NULL, NULL) $$, 'trigger: on a table of another shape');
SELECT lives_ok($$ DELETE FROM other $$, 'trigger: on a statement');
SELECT throws_ok($$ SELECT notify_outbox_insert() $$, '39P01', 'notify_outbox_insert() can only be called as a trigger',
                 'trigger: the function is no function to call');
SELECT lives_ok($$ SELECT outbox_wake() $$, 'wake: at any time');

SELECT * FROM finish();
ROLLBACK;
