-- Everything that psql can describe is described: lists what lacks a comment.

-- members of the extension; the sequence behind seq is its column's affair
SELECT pg_describe_object(d.classid, d.objid, 0) AS lacks_a_comment
FROM pg_depend d
JOIN pg_extension x ON x.oid = d.refobjid
WHERE x.extname = 'outbox' AND d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e'
  AND NOT EXISTS (SELECT FROM pg_depend i WHERE i.classid = d.classid AND i.objid = d.objid AND i.deptype = 'i')
  AND obj_description(d.objid, d.classid::regclass::text) IS NULL
ORDER BY 1;

-- columns of its tables and views
SELECT pg_describe_object('pg_class'::regclass, a.attrelid, a.attnum) AS lacks_a_comment
FROM pg_depend d
JOIN pg_extension x ON x.oid = d.refobjid
JOIN pg_class c ON c.oid = d.objid AND c.relkind IN ('r', 'v')
JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
WHERE x.extname = 'outbox' AND d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e' AND d.classid = 'pg_class'::regclass
  AND col_description(a.attrelid, a.attnum) IS NULL
ORDER BY c.relname COLLATE "C", a.attnum;

-- triggers of its tables
SELECT pg_describe_object('pg_trigger'::regclass, t.oid, 0) AS lacks_a_comment
FROM pg_depend d
JOIN pg_extension x ON x.oid = d.refobjid
JOIN pg_trigger t ON t.tgrelid = d.objid AND NOT t.tgisinternal
WHERE x.extname = 'outbox' AND d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e' AND d.classid = 'pg_class'::regclass
  AND obj_description(t.oid, 'pg_trigger') IS NULL
ORDER BY 1;
