-- Who may do what without and with a grant. The exact list of what the extension grants is in test/pgtap/schema.sql.
\set SHOW_CONTEXT never
CREATE ROLE regress_outbox_plain;
CREATE ROLE regress_outbox_writer;
CREATE ROLE regress_outbox_column_writer;
CREATE ROLE regress_outbox_operator;
CREATE ROLE regress_outbox_monitor IN ROLE pg_monitor;
CREATE ROLE regress_outbox_receiver;
INSERT INTO outbox_events (id, aggregate_type, aggregate_id, event_type, payload, retry_after)
VALUES ('00000000-0000-0000-0000-00000000000d', 'order', '1', 'order.created', '{}', 'infinity');

-- --- what the catalog says ---------------------------------------------------------------------------------------

-- PUBLIC has nothing on any table, view, sequence, column or function of the extension
SELECT pg_describe_object(d.classid, d.objid, 0) AS open_to_public, acl.privilege_type
FROM pg_depend d
JOIN pg_extension x ON x.oid = d.refobjid AND x.extname = 'outbox'
LEFT JOIN pg_class c ON d.classid = 'pg_class'::regclass AND c.oid = d.objid
LEFT JOIN pg_proc p ON d.classid = 'pg_proc'::regclass AND p.oid = d.objid
CROSS JOIN LATERAL aclexplode(CASE
    WHEN p.oid IS NOT NULL THEN coalesce(p.proacl, acldefault('f', p.proowner))
    WHEN c.relkind = 'S' THEN coalesce(c.relacl, acldefault('s', c.relowner))
    WHEN c.oid IS NOT NULL THEN coalesce(c.relacl, acldefault('r', c.relowner)) END) acl
WHERE d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e' AND acl.grantee = 0
UNION ALL
SELECT pg_describe_object('pg_class'::regclass, a.attrelid, a.attnum), acl.privilege_type
FROM pg_attribute a, aclexplode(a.attacl) acl
WHERE a.attrelid IN ('outbox_events'::regclass, 'processed_events'::regclass, 'outbox_dead_letters'::regclass,
                     'outbox_status'::regclass) AND acl.grantee = 0
ORDER BY 1, 2;

-- every function is C or has a pinned search_path that ends in pg_temp; security definer is never C
SELECT p.oid::regprocedure AS unsafe, l.lanname, p.prosecdef, p.proconfig
FROM pg_depend d
JOIN pg_extension x ON x.oid = d.refobjid AND x.extname = 'outbox'
JOIN pg_proc p ON p.oid = d.objid
JOIN pg_language l ON l.oid = p.prolang
WHERE d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e' AND d.classid = 'pg_proc'::regclass
  AND (l.lanname <> 'c' OR p.prosecdef)
  AND (p.proconfig IS NULL OR NOT 'search_path=pg_catalog, pg_temp' = ANY (p.proconfig))
ORDER BY 1;
SELECT p.oid::regprocedure AS security_definer
FROM pg_depend d
JOIN pg_extension x ON x.oid = d.refobjid AND x.extname = 'outbox'
JOIN pg_proc p ON p.oid = d.objid
WHERE d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e' AND d.classid = 'pg_proc'::regclass AND p.prosecdef
ORDER BY p.proname COLLATE "C";

-- --- a plain role ------------------------------------------------------------------------------------------------

SET ROLE regress_outbox_plain;
SELECT count(*) FROM outbox_events;
INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', '1', 'order.created', '{}');
UPDATE outbox_events SET processed_at = now();
DELETE FROM outbox_events;
TRUNCATE outbox_events;
CREATE TRIGGER t BEFORE INSERT ON outbox_events FOR EACH ROW EXECUTE FUNCTION notify_outbox_insert();
SELECT nextval('outbox_events_seq_seq');
SELECT count(*) FROM processed_events;
INSERT INTO processed_events (event_id) VALUES ('00000000-0000-0000-0000-000000000001');
SELECT count(*) FROM outbox_dead_letters;
SELECT count(*) FROM outbox_status;
SELECT outbox_publish('order', '1', 'order.created', '{}');
SELECT outbox_replay('00000000-0000-0000-0000-00000000000d');
SELECT outbox_accept('00000000-0000-0000-0000-000000000001');
SELECT outbox_state(jsonb_populate_record(NULL::outbox_events, '{}'));
SELECT outbox_wake();
SELECT * FROM outbox_relay();
SELECT * FROM outbox_workers();
SELECT notify_outbox_insert();
-- nor a trigger on a table of its own, which would read whatever the function expects
CREATE TEMP TABLE own (id uuid);
CREATE TRIGGER t AFTER INSERT ON own FOR EACH ROW EXECUTE FUNCTION notify_outbox_insert();
DROP TABLE own;
-- where events go and with which secrets is not for everyone; servers word the errors differently
SELECT name FROM pg_settings WHERE name IN ('outbox.endpoint', 'outbox.http_headers', 'outbox.workers');
\set VERBOSITY sqlstate
SHOW outbox.endpoint;
SELECT current_setting('outbox.http_headers');
ALTER SYSTEM SET outbox.endpoint = 'http://example.com/';
\set VERBOSITY default
RESET ROLE;

-- --- a writer ----------------------------------------------------------------------------------------------------

-- INSERT is all it needs
GRANT INSERT ON outbox_events TO regress_outbox_writer;
GRANT INSERT (aggregate_type, aggregate_id, event_type, payload) ON outbox_events TO regress_outbox_column_writer;
BEGIN;
SET LOCAL ROLE regress_outbox_writer;
INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', '1', 'writer', '{}');
SET LOCAL ROLE regress_outbox_column_writer;
INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', '1', 'column writer', '{}');
RESET ROLE;
SELECT event_type, outbox_state(e) FROM outbox_events e ORDER BY seq;
ROLLBACK;
SET ROLE regress_outbox_writer;
SELECT count(*) FROM outbox_events;
INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', '1', 'x', '{}') RETURNING id;
UPDATE outbox_events SET processed_at = now();
DELETE FROM outbox_events;
SELECT outbox_publish('order', '1', 'order.created', '{}');
RESET ROLE;
SET ROLE regress_outbox_column_writer;
INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload, processed_at) VALUES ('order', '1', 'x', '{}', now());
RESET ROLE;
-- outbox_publish works with the caller's rights: INSERT, and no SELECT for the id that it returns
GRANT EXECUTE ON FUNCTION outbox_publish TO regress_outbox_writer, regress_outbox_plain;
BEGIN;
SET LOCAL ROLE regress_outbox_writer;
SELECT outbox_publish('order', '1', 'published', '{}') IS NOT NULL AS published;
RESET ROLE;
SELECT event_type, outbox_state(e) FROM outbox_events e ORDER BY seq;
ROLLBACK;
SET ROLE regress_outbox_plain;
SELECT outbox_publish('order', '1', 'order.created', '{}');
RESET ROLE;

-- --- an operator -------------------------------------------------------------------------------------------------

-- outbox_replay needs no right on the table, and gives none
GRANT EXECUTE ON FUNCTION outbox_replay TO regress_outbox_operator;
BEGIN;
SET LOCAL ROLE regress_outbox_operator;
SELECT outbox_replay('00000000-0000-0000-0000-00000000000d');
RESET ROLE;
SELECT outbox_state(e) FROM outbox_events e;
ROLLBACK;
SET ROLE regress_outbox_operator;
SELECT count(*) FROM outbox_events;
SELECT count(*) FROM outbox_dead_letters;
RESET ROLE;
GRANT SELECT ON outbox_dead_letters TO regress_outbox_operator;
SET ROLE regress_outbox_operator;
SELECT id FROM outbox_dead_letters;
SELECT count(*) FROM outbox_events;
RESET ROLE;

-- --- monitoring --------------------------------------------------------------------------------------------------

-- pg_monitor reads the state, never an event
SET ROLE regress_outbox_monitor;
SELECT pending, dead FROM outbox_status;
SELECT count(*) FROM outbox_relay();
SELECT count(*) >= 0 AS readable FROM outbox_workers();
SELECT count(*) FROM outbox_events;
SELECT count(*) FROM outbox_dead_letters;
SELECT outbox_replay('00000000-0000-0000-0000-00000000000d');
SELECT outbox_wake();
RESET ROLE;

-- --- a receiver --------------------------------------------------------------------------------------------------

-- outbox_accept needs no right on the table either, and objects of the caller's own do not get in its way
GRANT EXECUTE ON FUNCTION outbox_accept TO regress_outbox_receiver;
BEGIN;
SET LOCAL ROLE regress_outbox_receiver;
CREATE TEMP TABLE processed_events (event_id uuid CONSTRAINT processed_events_pkey PRIMARY KEY, processed_at text);
CREATE FUNCTION pg_temp.now() RETURNS timestamptz LANGUAGE sql AS $$ SELECT timestamptz 'epoch' $$;
SET LOCAL search_path = pg_temp, public, pg_catalog;
SELECT outbox_accept('00000000-0000-0000-0000-000000000001');
SELECT outbox_accept('00000000-0000-0000-0000-000000000001');
SELECT count(*) AS in_the_wrong_table FROM pg_temp.processed_events;
RESET ROLE;
RESET search_path;
DROP TABLE pg_temp.processed_events;
SELECT event_id, processed_at = now() AS now FROM processed_events;
ROLLBACK;

DELETE FROM outbox_events;
DROP OWNED BY regress_outbox_plain, regress_outbox_writer, regress_outbox_column_writer, regress_outbox_operator,
              regress_outbox_monitor, regress_outbox_receiver;
DROP ROLE regress_outbox_plain, regress_outbox_writer, regress_outbox_column_writer, regress_outbox_operator,
          regress_outbox_monitor, regress_outbox_receiver;
