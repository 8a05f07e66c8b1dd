-- The contract on names, types, defaults, indexes, privileges: what users, their queries and the relay rely on, as the
-- catalog has it. An intended change of the schema changes this file; nothing here says how anything behaves.
-- The extension may be in any schema of the search_path.
BEGIN;
SELECT plan(37);

CREATE TEMP TABLE ext AS
    SELECT x.oid, n.nspname, quote_ident(n.nspname) || '.' AS prefix
    FROM pg_extension x JOIN pg_namespace n ON n.oid = x.extnamespace WHERE x.extname = 'outbox';

-- a definition without the name of the extension's schema
CREATE FUNCTION pg_temp.bare(definition text) RETURNS text LANGUAGE sql
    AS $$ SELECT replace(definition, prefix, '') FROM ext $$;

CREATE TEMP VIEW members AS
    SELECT d.classid, d.objid FROM pg_depend d, ext
    WHERE d.refclassid = 'pg_extension'::regclass AND d.refobjid = ext.oid AND d.deptype = 'e';

-- --- the extension -----------------------------------------------------------------------------------------------

SELECT ok((SELECT nspname = ANY (current_schemas(false)) FROM ext), 'the extension is where this test looks');
SELECT is((SELECT extrelocatable FROM pg_extension WHERE extname = 'outbox'), false, 'it is not relocatable');
SELECT results_eq(
    $$ SELECT DISTINCT superuser, trusted, relocatable, schema, requires FROM pg_available_extension_versions WHERE name = 'outbox' $$,
    $$ VALUES (true, false, false, NULL::name, NULL::name[]) $$,
    'superusers only, not trusted, any schema, needs no other extension');
SELECT is((SELECT pg_get_userbyid(extowner) FROM pg_extension WHERE extname = 'outbox'), current_user::name, 'it belongs to who made it');

SELECT bag_eq(
    $$ SELECT i.type, pg_temp.bare(i.identity) FROM members m, pg_identify_object(m.classid, m.objid, 0) i $$,
    $$ VALUES
        ('table',    'outbox_events'),
        ('sequence', 'outbox_events_seq_seq'),
        ('table',    'processed_events'),
        ('view',     'outbox_dead_letters'),
        ('view',     'outbox_status'),
        ('function', 'notify_outbox_insert()'),
        ('function', 'outbox_publish(pg_catalog.text,pg_catalog.text,pg_catalog.text,pg_catalog.jsonb,pg_catalog.jsonb)'),
        ('function', 'outbox_state(outbox_events)'),
        ('function', 'outbox_wake()'),
        ('function', 'outbox_replay(pg_catalog.uuid)'),
        ('function', 'outbox_relay()'),
        ('function', 'outbox_workers()'),
        ('function', 'outbox_accept(pg_catalog.uuid)') $$,
    'these objects and no others');
SELECT is((SELECT count(*) FROM members m, pg_identify_object(m.classid, m.objid, 0) i, ext WHERE i.schema <> ext.nspname), 0::bigint,
          'all in one schema');

-- pg_dump saves rows and state
SELECT bag_eq(
    $$ SELECT c.oid::regclass::text, c.condition
       FROM pg_extension x, unnest(x.extconfig, x.extcondition) c (oid, condition) WHERE x.extname = 'outbox' $$,
    $$ VALUES ('outbox_events', ''), ('outbox_events_seq_seq', ''), ('processed_events', '') $$,
    'pg_dump includes all rows of events and inbox, and where seq stands');

-- --- columns: place, name, type, not null ------------------------------------------------------------------------

CREATE TEMP VIEW columns_of AS
    SELECT c.oid::regclass::text AS relation, a.attnum::int AS place, a.attname::text COLLATE "default" AS name,
           format_type(a.atttypid, a.atttypmod) AS type, a.attnotnull AS not_null
    FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid WHERE a.attnum > 0 AND NOT a.attisdropped;

SELECT results_eq(
    $$ SELECT place, name, type, not_null FROM columns_of WHERE relation = 'outbox_events' ORDER BY place $$,
    $$ VALUES
        (1,  'id',             'uuid',                     true),
        (2,  'aggregate_type', 'character varying(100)',   true),
        (3,  'aggregate_id',   'character varying(100)',   true),
        (4,  'event_type',     'character varying(100)',   true),
        (5,  'payload',        'jsonb',                    true),
        (6,  'attempts',       'integer',                  true),
        (7,  'created_at',     'timestamp with time zone', true),
        (8,  'processed_at',   'timestamp with time zone', false),
        (9,  'seq',            'bigint',                   true),
        (10, 'headers',        'jsonb',                    false),
        (11, 'retry_after',    'timestamp with time zone', false),
        (12, 'last_error',     'text',                     false),
        (13, 'origin',         'integer',                  true) $$,
    'columns of outbox_events');
SELECT results_eq(
    $$ SELECT place, name, type, not_null FROM columns_of WHERE relation = 'processed_events' ORDER BY place $$,
    $$ VALUES
        (1, 'event_id',     'uuid',                     true),
        (2, 'processed_at', 'timestamp with time zone', true) $$,
    'columns of processed_events');
SELECT results_eq(
    $$ SELECT place, name, type FROM columns_of WHERE relation = 'outbox_dead_letters' ORDER BY place $$,
    $$ SELECT place, name, type FROM columns_of WHERE relation = 'outbox_events' ORDER BY place $$,
    'outbox_dead_letters has the columns of outbox_events');
SELECT results_eq(
    $$ SELECT place, name, type FROM columns_of WHERE relation = 'outbox_status' ORDER BY place $$,
    $$ VALUES
        (1, 'state',          'text'),
        (2, 'workers',        'integer'),
        (3, 'pending',        'bigint'),
        (4, 'oldest_pending', 'interval'),
        (5, 'dead',           'bigint'),
        (6, 'in_flight',      'integer'),
        (7, 'last_error',     'text'),
        (8, 'since',          'timestamp with time zone') $$,
    'columns of outbox_status');

-- --- defaults ----------------------------------------------------------------------------------------------------

CREATE TEMP VIEW defaults_of AS
    SELECT d.adrelid::regclass::text AS relation, a.attname::text COLLATE "default" AS name, pg_get_expr(d.adbin, d.adrelid) AS value
    FROM pg_attrdef d JOIN pg_attribute a ON a.attrelid = d.adrelid AND a.attnum = d.adnum;

SELECT bag_eq(
    $$ SELECT name, value FROM defaults_of WHERE relation = 'outbox_events' AND name <> 'origin' $$,
    $$ VALUES ('id', 'gen_random_uuid()'), ('attempts', '0'), ('created_at', 'now()') $$,
    'defaults of outbox_events');
SELECT matches((SELECT value FROM defaults_of WHERE relation = 'outbox_events' AND name = 'origin'),
               $$^([0-9]+|'-[0-9]+'::integer)$$, 'origin is one number in all rows of an installation');
SELECT bag_eq(
    $$ SELECT name, value FROM defaults_of WHERE relation = 'processed_events' $$,
    $$ VALUES ('processed_at', 'now()') $$,
    'defaults of processed_events');
SELECT is((SELECT attidentity::text FROM pg_attribute WHERE attrelid = 'outbox_events'::regclass AND attname = 'seq'), 'a',
          'seq is generated always as identity');
SELECT is(pg_get_serial_sequence('outbox_events', 'seq')::regclass, 'outbox_events_seq_seq'::regclass, 'by outbox_events_seq_seq');
SELECT results_eq(
    $$ SELECT seqtypid::regtype::text, seqstart, seqincrement, seqmax, seqcache, seqcycle
       FROM pg_sequence WHERE seqrelid = 'outbox_events_seq_seq'::regclass $$,
    $$ VALUES ('bigint', 1::bigint, 1::bigint, 9223372036854775807, 1::bigint, false) $$,
    'which counts from 1 by 1 and hands out numbers one by one');

-- --- keys, indexes, storage --------------------------------------------------------------------------------------

-- servers from 18 on list NOT NULL as well
SELECT bag_eq(
    $$ SELECT conrelid::regclass::text, conname::text, pg_get_constraintdef(oid)
       FROM pg_constraint WHERE conrelid IN ('outbox_events'::regclass, 'processed_events'::regclass) AND contype <> 'n' $$,
    $$ VALUES ('outbox_events', 'outbox_events_pkey', 'PRIMARY KEY (id)'),
              ('processed_events', 'processed_events_pkey', 'PRIMARY KEY (event_id)') $$,
    'primary keys, and no other constraints');

SELECT bag_eq(
    $$ SELECT pg_temp.bare(pg_get_indexdef(indexrelid))
       FROM pg_index WHERE indrelid IN ('outbox_events'::regclass, 'processed_events'::regclass) $$,
    $$ VALUES
        ('CREATE UNIQUE INDEX outbox_events_pkey ON outbox_events USING btree (id)'),
        ('CREATE INDEX idx_outbox_unprocessed ON outbox_events USING btree (created_at) WHERE (processed_at IS NULL)'),
        ('CREATE INDEX outbox_events_ready ON outbox_events USING btree (aggregate_type, seq) WHERE ((processed_at IS NULL) AND (retry_after IS NULL))'),
        ('CREATE INDEX outbox_events_due ON outbox_events USING btree (aggregate_type, retry_after, seq) WHERE ((processed_at IS NULL) AND (retry_after > ''-infinity''::timestamp with time zone) AND (retry_after < ''infinity''::timestamp with time zone))'),
        ('CREATE INDEX outbox_events_waiting ON outbox_events USING btree (aggregate_type, aggregate_id, seq) WHERE ((processed_at IS NULL) AND (retry_after < ''infinity''::timestamp with time zone))'),
        ('CREATE INDEX outbox_events_dead ON outbox_events USING btree (aggregate_type, aggregate_id, seq) WHERE ((processed_at IS NULL) AND (retry_after = ''infinity''::timestamp with time zone))'),
        ('CREATE UNIQUE INDEX processed_events_pkey ON processed_events USING btree (event_id)') $$,
    'indexes and their predicates, and no others');
SELECT is((SELECT count(*) FROM pg_index WHERE indrelid = 'outbox_events'::regclass AND NOT (indisvalid AND indisready)), 0::bigint,
          'all in use');

SELECT set_eq(
    $$ SELECT unnest(reloptions) FROM pg_class WHERE oid = 'outbox_events'::regclass $$,
    $$ VALUES ('vacuum_truncate=off'), ('autovacuum_vacuum_scale_factor=0.02'),
              ('autovacuum_vacuum_insert_scale_factor=0.1'), ('autovacuum_analyze_scale_factor=0.1') $$,
    'outbox_events is vacuumed often and never truncated');
SELECT results_eq(
    $$ SELECT relname::text COLLATE "default", relpersistence::text, relkind::text, relrowsecurity, relhasrules, relispartition
       FROM pg_class WHERE oid IN ('outbox_events'::regclass, 'processed_events'::regclass) ORDER BY relname COLLATE "C" $$,
    $$ VALUES ('outbox_events', 'p', 'r', false, false, false), ('processed_events', 'p', 'r', false, false, false) $$,
    'both are plain, logged tables without policies and rules');

-- --- the trigger -------------------------------------------------------------------------------------------------

SELECT results_eq(
    $$ SELECT tgrelid::regclass::text, tgname::text COLLATE "default", pg_temp.bare(pg_get_triggerdef(oid)), tgfoid::regproc::text, tgenabled::text
       FROM pg_trigger WHERE tgrelid IN ('outbox_events'::regclass, 'processed_events'::regclass) $$,
    $$ VALUES ('outbox_events', 'outbox_insert_notify',
               'CREATE TRIGGER outbox_insert_notify AFTER INSERT ON outbox_events FOR EACH ROW EXECUTE FUNCTION notify_outbox_insert()',
               'notify_outbox_insert', 'A') $$,
    'one trigger, after insert of a row, also under session_replication_role = replica');

-- --- functions ---------------------------------------------------------------------------------------------------

CREATE TEMP VIEW functions_of AS
    SELECT p.oid, p.proname::text AS name, pg_temp.bare(pg_get_function_arguments(p.oid)) AS arguments, pg_temp.bare(pg_get_function_result(p.oid)) AS result,
           l.lanname::text AS language, p.provolatile::text AS volatility, p.proisstrict AS strict, p.prosecdef AS definer,
           p.proparallel::text AS parallel, p.proretset AS returns_set, array_to_string(p.proconfig, '; ') AS config, p.probin, p.prosrc
    FROM members m JOIN pg_proc p ON p.oid = m.objid JOIN pg_language l ON l.oid = p.prolang
    WHERE m.classid = 'pg_proc'::regclass;

CREATE TEMP TABLE wanted (name text PRIMARY KEY, arguments text, result text, language text, volatility text, strict bool, definer bool, parallel text, returns_set bool);
INSERT INTO wanted VALUES
    ('notify_outbox_insert', '', 'trigger', 'c', 'v', false, false, 'u', false),
    ('outbox_publish', 'aggregate_type text, aggregate_id text, event_type text, payload jsonb, headers jsonb DEFAULT NULL::jsonb',
                       'uuid', 'plpgsql', 'v', false, false, 'u', false),
    ('outbox_state', 'e outbox_events', 'text', 'sql', 's', true, false, 's', false),
    ('outbox_wake', '', 'void', 'c', 'v', false, false, 'u', false),
    ('outbox_replay', 'id uuid', 'boolean', 'plpgsql', 'v', false, true, 'u', false),
    ('outbox_accept', 'event_id uuid', 'boolean', 'plpgsql', 'v', false, true, 'u', false),
    ('outbox_relay', 'OUT state text, OUT workers integer, OUT in_flight integer, OUT last_error text, OUT since timestamp with time zone',
                     'record', 'c', 'v', false, false, 'u', false),
    ('outbox_workers', 'OUT ordinal integer, OUT pid integer, OUT status text, OUT state text, OUT started_at timestamp with time zone, '
                       'OUT in_flight integer, OUT unrecorded integer, OUT turns bigint, OUT wal_flushes bigint, OUT wakeups_commit bigint, '
                       'OUT wakeups_poll bigint, OUT claimed bigint, OUT delivered bigint, OUT failed bigint, OUT dead bigint, '
                       'OUT log_suppressed bigint, OUT last_error text',
                       'SETOF record', 'c', 'v', false, false, 'u', true);

SELECT is(
    (SELECT jsonb_pretty(to_jsonb(f)) FROM (
        SELECT name, arguments, result, language, volatility, strict, definer, parallel, returns_set FROM functions_of) f
     WHERE f.name = w.name),
    jsonb_pretty(to_jsonb(w)),
    'function ' || w.name)
FROM wanted w ORDER BY name COLLATE "C";
SELECT is((SELECT count(*) FROM functions_of WHERE language <> 'c' AND config IS DISTINCT FROM 'search_path=pg_catalog, pg_temp'), 0::bigint,
          'what is not C has its search_path pinned, and sets nothing else');
SELECT is((SELECT count(*) FROM functions_of WHERE language = 'c' AND (definer OR config IS NOT NULL)), 0::bigint,
          'what is C has the caller''s rights and settings');
SELECT bag_eq(
    $$ SELECT name, probin, prosrc FROM functions_of WHERE language = 'c' $$,
    $$ SELECT name, '$libdir/outbox', name AS symbol FROM wanted WHERE language = 'c' $$,
    'C functions are in the library under their own names');

-- --- privileges --------------------------------------------------------------------------------------------------

SELECT bag_eq(
    $$ SELECT pg_temp.bare(i.identity), acl.grantee::regrole::text, acl.privilege_type, acl.is_grantable
       FROM members m
       CROSS JOIN LATERAL pg_identify_object(m.classid, m.objid, 0) i
       LEFT JOIN pg_class c ON m.classid = 'pg_class'::regclass AND c.oid = m.objid
       LEFT JOIN pg_proc p ON m.classid = 'pg_proc'::regclass AND p.oid = m.objid
       CROSS JOIN LATERAL aclexplode(CASE
           WHEN p.oid IS NOT NULL THEN coalesce(p.proacl, acldefault('f', p.proowner))
           WHEN c.relkind = 'S' THEN coalesce(c.relacl, acldefault('s', c.relowner))
           ELSE coalesce(c.relacl, acldefault('r', c.relowner)) END) acl
       WHERE acl.grantee <> coalesce(c.relowner, p.proowner) $$,
    $$ VALUES ('outbox_status', 'pg_monitor', 'SELECT', false),
              ('outbox_relay()', 'pg_monitor', 'EXECUTE', false),
              ('outbox_workers()', 'pg_monitor', 'EXECUTE', false) $$,
    'besides the owner, pg_monitor may see the state of the relay, and nobody anything else');
SELECT is((SELECT count(*) FROM pg_attribute a JOIN members m ON m.classid = 'pg_class'::regclass AND a.attrelid = m.objid
           WHERE a.attacl IS NOT NULL), 0::bigint, 'nothing is granted by column');
SELECT is((SELECT count(DISTINCT coalesce(c.relowner, p.proowner))
           FROM members m LEFT JOIN pg_class c ON m.classid = 'pg_class'::regclass AND c.oid = m.objid
           LEFT JOIN pg_proc p ON m.classid = 'pg_proc'::regclass AND p.oid = m.objid), 1::bigint, 'one role owns everything');

SELECT * FROM finish();
ROLLBACK;
