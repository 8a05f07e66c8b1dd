-- The backlog: :events committed events of about 200 bytes over :aggregates aggregates, 200 rows a
-- statement and a transaction. Then the table is vacuumed, analysed and checkpointed, for every
-- relay alike, so that no autovacuum or checkpoint left over from the filling falls into the run.
-- (psql does not replace variables inside a DO block: they travel as settings.)
SELECT set_config('bench.events', :'events', false),
       set_config('bench.aggregates', :'aggregates', false) \g /dev/null
DO $$
DECLARE
    events constant int := current_setting('bench.events');
    aggregates constant int := current_setting('bench.aggregates');
BEGIN
    FOR batch IN 0 .. events - 1 BY 200 LOOP
        INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
        SELECT 'order', 'order-' || lpad((n % aggregates)::text, 5, '0'), 'order.created',
               jsonb_build_object(
                   'order_id', 'order-' || lpad(n::text, 8, '0'),
                   'customer', 'customer-' || lpad((n % 7000)::text, 6, '0'),
                   'items', jsonb_build_array(jsonb_build_object(
                       'sku', 'sku-' || lpad((n % 5000)::text, 6, '0'),
                       'quantity', 2, 'price', 1999)),
                   'total', 3998, 'currency', 'EUR', 'placed_by', 'web',
                   'note', 'leave at the door, ring twice')
        FROM generate_series(batch, least(batch + 200, events) - 1) n;
        COMMIT;
    END LOOP;
END $$;
VACUUM (ANALYZE) outbox_events;
CHECKPOINT;
