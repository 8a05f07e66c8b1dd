-- Leaving and coming back, in a schema that is on nobody's search_path. The extension that the other files test is back
-- after the rollback. What the relay does about it is for test/t.
BEGIN;
SELECT plan(18);

SELECT set_config('search_path', 'pg_catalog, ' || extnamespace::regnamespace, true) AS path FROM pg_extension WHERE extname = 'pgtap' \gset
CREATE TEMP TABLE old AS
    SELECT n.nspname, c.oid AS events, pg_get_expr(d.adbin, d.adrelid) AS origin
    FROM pg_extension x
    JOIN pg_namespace n ON n.oid = x.extnamespace
    JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = 'outbox_events'
    JOIN pg_attribute a ON a.attrelid = c.oid AND a.attname = 'origin'
    JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
    WHERE x.extname = 'outbox';

-- --- DROP EXTENSION ----------------------------------------------------------------------------------------------

SELECT lives_ok('DROP EXTENSION outbox', 'DROP EXTENSION');
SELECT is((SELECT count(*) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace JOIN old USING (nspname)
           WHERE relname ~ 'outbox|processed_events'), 0::bigint, 'leaves no table, index or view');
SELECT is((SELECT count(*) FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace JOIN old USING (nspname)
           WHERE proname ~ 'outbox'), 0::bigint, 'leaves no function');

-- --- CREATE EXTENSION in a schema of its own ---------------------------------------------------------------------

CREATE SCHEMA "Events & more";
CREATE ROLE outbox_test_owner;
GRANT ALL ON SCHEMA "Events & more" TO outbox_test_owner;
SELECT format('GRANT CREATE ON DATABASE %I TO outbox_test_owner', current_database()) \gexec
CREATE FUNCTION pg_temp.as_owner(command text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    SET LOCAL ROLE outbox_test_owner;
    EXECUTE command;
    RESET ROLE;
END
$$;
SELECT throws_ok($$ SELECT pg_temp.as_owner('CREATE EXTENSION outbox SCHEMA "Events & more"') $$, '42501',
                 'permission denied to create extension "outbox"', 'CREATE EXTENSION is for superusers');
SELECT lives_ok('CREATE EXTENSION outbox SCHEMA "Events & more"', 'CREATE EXTENSION in any schema');
SELECT throws_ok('CREATE EXTENSION outbox', '42710', 'extension "outbox" already exists', 'but once in a database');
SELECT throws_ok('ALTER EXTENSION outbox SET SCHEMA public', '0A000', NULL, 'it cannot be moved');
SELECT is((SELECT extnamespace::regnamespace::text FROM pg_extension WHERE extname = 'outbox'), '"Events & more"', 'it is where it was told to be');
SELECT isnt((SELECT pg_get_expr(d.adbin, d.adrelid) FROM pg_attrdef d JOIN pg_attribute a ON a.attrelid = d.adrelid AND a.attnum = d.adnum
             WHERE d.adrelid = '"Events & more".outbox_events'::regclass AND a.attname = 'origin'), (SELECT origin FROM old),
            'it is another installation, with an origin of its own');

-- everything works by its qualified name
SELECT lives_ok(
    $$ INSERT INTO "Events & more".outbox_events (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', '1', 'inserted', '{}') $$,
    'INSERT');
SELECT lives_ok($$ SELECT "Events & more".outbox_publish('order', '1', 'published', '{}') $$, 'outbox_publish');
SELECT results_eq($$ SELECT "Events & more".outbox_state(e) FROM "Events & more".outbox_events e $$, $$ VALUES ('ready'), ('ready') $$, 'outbox_state');
UPDATE "Events & more".outbox_events SET retry_after = 'infinity';
SELECT results_eq($$ SELECT event_type::text FROM "Events & more".outbox_dead_letters $$, $$ VALUES ('inserted'), ('published') $$, 'outbox_dead_letters');
SELECT results_eq($$ SELECT "Events & more".outbox_replay(id) FROM "Events & more".outbox_dead_letters $$, $$ VALUES (true), (true) $$, 'outbox_replay');
SELECT is("Events & more".outbox_accept('00000000-0000-0000-0000-000000000001'), true, 'outbox_accept');
SELECT results_eq($$ SELECT pending, dead FROM "Events & more".outbox_status $$, $$ VALUES (2::bigint, 0::bigint) $$, 'outbox_status');
SET LOCAL client_min_messages = warning;
SELECT lives_ok('DROP SCHEMA "Events & more" CASCADE', 'the schema takes the extension along');
SELECT is((SELECT count(*) FROM pg_extension WHERE extname = 'outbox'), 0::bigint, 'and it is gone');

SELECT * FROM finish();
ROLLBACK;
