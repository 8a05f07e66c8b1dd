-- The wake-up of a hand-written relay: one notification a row. Added for the latency run only, so
-- that the throughput run does not pay for it.
CREATE FUNCTION notify_outbox_insert() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('outbox_event', NEW.id::text);
    RETURN NULL;
END $$;
CREATE TRIGGER outbox_insert_notify AFTER INSERT ON outbox_events
    FOR EACH ROW EXECUTE FUNCTION notify_outbox_insert();
