"""What a table of records has that a partitioned one in its place would lose: found before the exchange, which is then refused.

Most of it is bound to the table and not to its name, so it would silently stay with the first partition. What the exchange takes
along by itself is not named: indexes, triggers, views, rights, CHECKs, and the library's own policies.
"""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import Connection

_AGAIN = "drop it, and make it again afterwards"
_WITHOUT = "drop it: a table in partitions cannot have it"

# `kind` and `name` of each object, and what to do about it. %(policies)s: the library's own.
_FOUND = f"""
WITH records AS (SELECT c.oid, c.reltype, c.reltoastrelid FROM pg_class c WHERE c.oid = 'idempotency.records'::regclass)
SELECT 'policy ' || quote_ident(p.polname), '{_AGAIN}' FROM pg_policy p, records r
WHERE p.polrelid = r.oid AND p.polname <> ALL (%(policies)s::text[])
UNION ALL
SELECT 'constraint ' || quote_ident(n.conname), '{_WITHOUT}' FROM pg_constraint n, records r
WHERE n.conrelid = r.oid AND n.contype NOT IN ('p', 'n', 't')
  -- a CHECK goes along, unless it is of one table alone, or of a row as a whole
  AND NOT (n.contype = 'c' AND NOT n.connoinherit AND 0 <> ALL (coalesce(n.conkey, '{{}}')))
UNION ALL
SELECT 'foreign key ' || quote_ident(n.conname) || ' of ' || n.conrelid::regclass, '{_WITHOUT}' FROM pg_constraint n, records r
WHERE n.confrelid = r.oid AND n.conrelid <> r.oid AND n.contype = 'f'
UNION ALL
SELECT 'index ' || quote_ident(i.relname),
       CASE WHEN x.indisunique THEN '{_WITHOUT}' ELSE 'it is not valid: drop it, or REINDEX it' END
FROM pg_index x JOIN pg_class i ON i.oid = x.indexrelid, records r
WHERE x.indrelid = r.oid AND i.relname <> 'records_placed' AND NOT x.indisprimary AND (x.indisunique OR NOT x.indisvalid)
  AND NOT EXISTS (SELECT FROM pg_constraint n WHERE n.conindid = x.indexrelid)
UNION ALL
SELECT 'trigger ' || quote_ident(t.tgname), '{_WITHOUT}' FROM pg_trigger t, records r
WHERE t.tgrelid = r.oid AND NOT t.tgisinternal
  AND (t.tgconstraint <> 0 OR (t.tgoldtable IS NOT NULL OR t.tgnewtable IS NOT NULL) AND t.tgtype & 1 = 1)
UNION ALL
SELECT 'rule ' || quote_ident(w.rulename), '{_AGAIN}' FROM pg_rewrite w, records r WHERE w.ev_class = r.oid
UNION ALL
SELECT 'replica identity', 'ALTER TABLE idempotency.records REPLICA IDENTITY DEFAULT: new partitions would not have it'
FROM pg_class c JOIN records r ON r.oid = c.oid WHERE c.relreplident <> 'd'
UNION ALL
-- bound by number: publications, materialized views, functions of standard SQL, policies of other tables, statistics, sequences,
-- tables that inherit, whatever has the type of its rows
SELECT DISTINCT pg_describe_object(
           CASE WHEN w.oid IS NULL THEN d.classid ELSE 'pg_class'::regclass END, coalesce(w.ev_class, d.objid), 0), '{_AGAIN}'
FROM pg_depend d LEFT JOIN pg_rewrite w ON d.classid = 'pg_rewrite'::regclass AND w.oid = d.objid, records r
WHERE (d.refclassid = 'pg_class'::regclass AND d.refobjid = r.oid OR d.refclassid = 'pg_type'::regclass AND d.refobjid IN (
        r.reltype, (SELECT t.typarray FROM pg_type t WHERE t.oid = r.reltype)))
  AND NOT (d.deptype = 'i' AND d.classid IN ('pg_class'::regclass, 'pg_type'::regclass))
  AND CASE d.classid
      WHEN 'pg_class'::regclass THEN d.objid <> r.oid AND NOT EXISTS (SELECT FROM pg_index x WHERE x.indexrelid = d.objid)
      WHEN 'pg_type'::regclass THEN d.objid <> r.reltype AND d.deptype <> 'i'
      WHEN 'pg_attrdef'::regclass THEN false
      WHEN 'pg_trigger'::regclass THEN EXISTS (
          SELECT FROM pg_trigger t WHERE t.oid = d.objid AND t.tgrelid <> r.oid AND NOT t.tgisinternal)
      WHEN 'pg_policy'::regclass THEN EXISTS (SELECT FROM pg_policy p WHERE p.oid = d.objid AND p.polrelid <> r.oid)
      WHEN 'pg_constraint'::regclass THEN EXISTS (
          SELECT FROM pg_constraint n WHERE n.oid = d.objid AND n.conrelid <> r.oid AND n.contype <> 'f')
      WHEN 'pg_rewrite'::regclass THEN w.ev_class <> r.oid AND NOT EXISTS (
          SELECT FROM pg_class v WHERE v.oid = w.ev_class AND v.relkind = 'v')
      ELSE true END
ORDER BY 1
"""


def objects_in_the_way(connection: Connection, policies: Collection[str]) -> list[str]:
    """The objects that have to go before the records are partitioned, one text each, with what to do.

    `policies`: the names of the library's own, which are made again.
    """
    rows = connection.exec_driver_sql(_FOUND, {"policies": list(policies)}).all()
    return [f"{name}: {advice}" for name, advice in rows]
