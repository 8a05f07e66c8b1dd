-- The settings: names, defaults, units and bounds, and every kind of value that is refused. No value is put in force.
-- Where the library is not preloaded, names without it would take any value, and ALTER ROLE would keep it.
LOAD 'outbox';

-- what SHOW says, before anybody has set anything
SELECT name, current_setting(name) AS show, vartype AS type, unit, min_val AS min, max_val AS max, context
FROM pg_settings WHERE name LIKE 'outbox.%' ORDER BY name COLLATE "C";
SELECT name, boot_val, setting, enumvals
FROM pg_settings WHERE name LIKE 'outbox.%' AND (vartype = 'enum' OR boot_val IS DISTINCT FROM setting)
ORDER BY name COLLATE "C";
SELECT name AS lacks_a_description FROM pg_settings WHERE name LIKE 'outbox.%' AND coalesce(short_desc, '') = '';
SELECT name AS set_somewhere FROM pg_settings WHERE name LIKE 'outbox.%' AND source <> 'default';

-- the prefix is reserved: a misspelt name is an error
SET outbox.nonsense = 1;
SET outbox.endpoints = 'http://example.com/';

-- only the server's configuration decides: not a session, not a role, not the owner of a database
SELECT current_database() AS database \gset
SET outbox.endpoint = 'http://example.com/';
SET LOCAL outbox.notify = on;
SELECT set_config('outbox.retention', '0', false);
ALTER ROLE CURRENT_USER SET outbox.endpoint = 'http://example.com/';
ALTER DATABASE :"database" SET outbox.endpoint = 'http://example.com/';

-- endpoint: scheme
ALTER SYSTEM SET outbox.endpoint = 'ftp://example.com/';
ALTER SYSTEM SET outbox.endpoint = 'file:///etc/passwd';
ALTER SYSTEM SET outbox.endpoint = 'unix:///run/receiver.sock';
ALTER SYSTEM SET outbox.endpoint = 'example.com/hook';
ALTER SYSTEM SET outbox.endpoint = ' http://example.com/';
ALTER SYSTEM SET outbox.endpoint = '/hook';
-- endpoint: host and port
ALTER SYSTEM SET outbox.endpoint = 'http://';
ALTER SYSTEM SET outbox.endpoint = 'http:///hook';
ALTER SYSTEM SET outbox.endpoint = 'http://exam$ple.com/';
ALTER SYSTEM SET outbox.endpoint = 'http://[::1/';
ALTER SYSTEM SET outbox.endpoint = 'http://a@b@example.com/';
ALTER SYSTEM SET outbox.endpoint = 'http://example.com:/';
ALTER SYSTEM SET outbox.endpoint = 'http://example.com:99999/';
ALTER SYSTEM SET outbox.endpoint = 'http://example.com:http/';
-- endpoint: placeholders before the path
ALTER SYSTEM SET outbox.endpoint = '{aggregate_type}://example.com/';
ALTER SYSTEM SET outbox.endpoint = 'http://{aggregate_type}';
ALTER SYSTEM SET outbox.endpoint = 'http://{aggregate_type}.example.com/';
ALTER SYSTEM SET outbox.endpoint = 'http://{event_type}@example.com/';
ALTER SYSTEM SET outbox.endpoint = 'http://example.com:{aggregate_id}/';
-- endpoint: unknown placeholders and stray braces
ALTER SYSTEM SET outbox.endpoint = 'http://example.com/{payload}';
ALTER SYSTEM SET outbox.endpoint = 'http://example.com/{Aggregate_Type}';
ALTER SYSTEM SET outbox.endpoint = 'http://example.com/{aggregate_type';
ALTER SYSTEM SET outbox.endpoint = 'http://example.com/aggregate_type}';
ALTER SYSTEM SET outbox.endpoint = 'http://example.com/{}';
ALTER SYSTEM SET outbox.endpoint = 'http://example.com/{{aggregate_type}}';
ALTER SYSTEM SET outbox.endpoint = 'http://example.com/?id={id}';
-- endpoint: values could leave their path segment
ALTER SYSTEM SET outbox.endpoint = 'http://example.com/%2f{aggregate_id}';
-- endpoint: characters
ALTER SYSTEM SET outbox.endpoint = 'http://example.com/#fragment';
ALTER SYSTEM SET outbox.endpoint = 'http://example.com/{aggregate_type}#{aggregate_id}';
ALTER SYSTEM SET outbox.endpoint = 'http://example.com/a b';
ALTER SYSTEM SET outbox.endpoint = 'http://example.com/a\b';
ALTER SYSTEM SET outbox.endpoint = 'http://example.com/ä';
ALTER SYSTEM SET outbox.endpoint = 'http://example.com/%zz';
ALTER SYSTEM SET outbox.endpoint = 'http://example.com/%2';
ALTER SYSTEM SET outbox.endpoint = E'http://example.com/\tx';

-- http_headers: not an object of strings
ALTER SYSTEM SET outbox.http_headers = 'X-Tenant: acme';
ALTER SYSTEM SET outbox.http_headers = '{"X-Tenant": "acme"';
ALTER SYSTEM SET outbox.http_headers = '{"X-Tenant": "acme"} {}';
ALTER SYSTEM SET outbox.http_headers = '["X-Tenant"]';
ALTER SYSTEM SET outbox.http_headers = '"X-Tenant"';
ALTER SYSTEM SET outbox.http_headers = 'null';
ALTER SYSTEM SET outbox.http_headers = '{"X-Tenant": 1}';
ALTER SYSTEM SET outbox.http_headers = '{"X-Tenant": null}';
ALTER SYSTEM SET outbox.http_headers = '{"X-Tenant": true}';
ALTER SYSTEM SET outbox.http_headers = '{"X-Tenant": ["acme"]}';
ALTER SYSTEM SET outbox.http_headers = '{"X-Tenant": {"name": "acme"}}';
-- http_headers: names and values that would end a line
ALTER SYSTEM SET outbox.http_headers = '{"X Tenant": "acme"}';
ALTER SYSTEM SET outbox.http_headers = '{"X-Tenant:": "acme"}';
ALTER SYSTEM SET outbox.http_headers = '{"": "acme"}';
ALTER SYSTEM SET outbox.http_headers = '{"X-Tenant\r\nX-Other": "acme"}';
ALTER SYSTEM SET outbox.http_headers = '{"X-Ténant": "acme"}';
ALTER SYSTEM SET outbox.http_headers = '{"X-Tenant": "acme\r\nX-Other: x"}';
ALTER SYSTEM SET outbox.http_headers = '{"X-Tenant": "acme\u007f"}';
ALTER SYSTEM SET outbox.http_headers = '{"X-Tenant": "acme\u0000"}';
-- http_headers: names that the relay or HTTP sets itself
ALTER SYSTEM SET outbox.http_headers = '{"Host": "example.com"}';
ALTER SYSTEM SET outbox.http_headers = '{"content-LENGTH": "0"}';
ALTER SYSTEM SET outbox.http_headers = '{"Transfer-Encoding": "chunked"}';
ALTER SYSTEM SET outbox.http_headers = '{"Content-Type": "text/plain"}';
ALTER SYSTEM SET outbox.http_headers = '{"Idempotency-Key": "1"}';
ALTER SYSTEM SET outbox.http_headers = '{"X-Tenant": "acme", "Ce-Id": "1"}';
ALTER SYSTEM SET outbox.http_headers = '{"outbox-replay": "true"}';
ALTER SYSTEM SET outbox.http_headers = '{"webhook-signature": "v1,x"}';

-- source
ALTER SYSTEM SET outbox.source = 'urn:example: orders';
ALTER SYSTEM SET outbox.source = E'urn:example:\torders';

-- ca_file
ALTER SYSTEM SET outbox.ca_file = 'ca.pem';
ALTER SYSTEM SET outbox.ca_file = '../ca.pem';

-- databases
ALTER SYSTEM SET outbox.databases = 'shop,,billing';
ALTER SYSTEM SET outbox.databases = 'shop billing';
ALTER SYSTEM SET outbox.databases = 'shop,';
ALTER SYSTEM SET outbox.databases = '"shop';

-- values that are not worth printing: control characters, and a URL of 8001 bytes
SELECT 'http://example.com/' || repeat('x', 7982) AS long_url \gset
\set VERBOSITY sqlstate
ALTER SYSTEM SET outbox.endpoint = E'http://example.com/\x01';
ALTER SYSTEM SET outbox.endpoint = E'http://example.com/\x7f';
ALTER SYSTEM SET outbox.endpoint = :'long_url';
ALTER SYSTEM SET outbox.source = E'urn:example:orders\x7f';
ALTER SYSTEM SET outbox.ca_file = E'/etc/ssl/\x01ca.pem';
\set VERBOSITY default

-- choices
ALTER SYSTEM SET outbox.format = 'xml';
ALTER SYSTEM SET outbox.format = '';
ALTER SYSTEM SET outbox.ordering = 'global';
ALTER SYSTEM SET outbox.notify = 'sometimes';

-- numbers
ALTER SYSTEM SET outbox.workers = 0;
ALTER SYSTEM SET outbox.workers = 65;
ALTER SYSTEM SET outbox.workers = 'all';
ALTER SYSTEM SET outbox.batch_size = 0;
ALTER SYSTEM SET outbox.batch_size = 10001;
ALTER SYSTEM SET outbox.max_in_flight = 0;
ALTER SYSTEM SET outbox.max_in_flight = 10001;
ALTER SYSTEM SET outbox.max_attempts = 0;
ALTER SYSTEM SET outbox.max_attempts = -1;
ALTER SYSTEM SET outbox.max_attempts = 2147483648;
ALTER SYSTEM SET outbox.poll_interval = '5 parsecs';
ALTER SYSTEM SET outbox.max_in_flight_bytes = '64 MiB';

-- numbers with units: a step beyond the bounds above; servers word this differently
\set VERBOSITY sqlstate
ALTER SYSTEM SET outbox.max_in_flight_bytes = '63kB';
ALTER SYSTEM SET outbox.max_in_flight_bytes = '2TB';
ALTER SYSTEM SET outbox.poll_interval = '99ms';
ALTER SYSTEM SET outbox.poll_interval = '61min';
ALTER SYSTEM SET outbox.connect_timeout = 0;
ALTER SYSTEM SET outbox.connect_timeout = '61min';
ALTER SYSTEM SET outbox.request_timeout = 0;
ALTER SYSTEM SET outbox.request_timeout = '61min';
ALTER SYSTEM SET outbox.shutdown_timeout = -1;
ALTER SYSTEM SET outbox.shutdown_timeout = '61min';
ALTER SYSTEM SET outbox.retry_base = 0;
ALTER SYSTEM SET outbox.retry_base = '25h';
ALTER SYSTEM SET outbox.retry_cap = 0;
ALTER SYSTEM SET outbox.retry_cap = '8d';
ALTER SYSTEM SET outbox.retention = -2;
ALTER SYSTEM SET outbox.retention = '100000d';
\set VERBOSITY default

-- nothing of it has been kept
SELECT name, setting FROM pg_file_settings WHERE name LIKE 'outbox.%' ORDER BY seqno;

-- what is accepted; it is not reloaded and taken back below
ALTER SYSTEM SET outbox.endpoint = '';
ALTER SYSTEM SET outbox.endpoint = 'http://localhost';
ALTER SYSTEM SET outbox.endpoint = 'HTTP://127.0.0.1:8080?x=y';
ALTER SYSTEM SET outbox.endpoint = 'http://[2001:db8::1]:8080/hook';
ALTER SYSTEM SET outbox.endpoint = 'https://user:p%40ss@example.com/v1/{aggregate_type}/x-{aggregate_id}?t={event_type}&u=%2F';
ALTER SYSTEM SET outbox.http_headers = '';
ALTER SYSTEM SET outbox.http_headers = '{}';
ALTER SYSTEM SET outbox.http_headers = '{"Authorization": "Bearer x", "X-Tenant": "", "X-Name": "Zoë"}';
ALTER SYSTEM SET outbox.source = '/orders';
ALTER SYSTEM SET outbox.ca_file = '/etc/ssl/certs/ca-certificates.crt';
ALTER SYSTEM SET outbox.databases = '';
ALTER SYSTEM SET outbox.databases = '*';
ALTER SYSTEM SET outbox.databases = 'shop', 'billing';
ALTER SYSTEM SET outbox.databases = 'shop, "Billing 2"';
ALTER SYSTEM SET outbox.format = 'json';
ALTER SYSTEM SET outbox.format = 'payload';
ALTER SYSTEM SET outbox.ordering = 'none';
ALTER SYSTEM SET outbox.retention = 0;
ALTER SYSTEM SET outbox.retention = -1;
ALTER SYSTEM SET outbox.shutdown_timeout = 0;
ALTER SYSTEM SET outbox.poll_interval = '100ms';
ALTER SYSTEM SET outbox.max_in_flight_bytes = '1GB';
ALTER SYSTEM SET outbox.notify = on;
SELECT name, setting, error FROM pg_file_settings WHERE name LIKE 'outbox.%' ORDER BY name COLLATE "C";

ALTER SYSTEM RESET outbox.endpoint;
ALTER SYSTEM RESET outbox.http_headers;
ALTER SYSTEM RESET outbox.source;
ALTER SYSTEM RESET outbox.ca_file;
ALTER SYSTEM RESET outbox.databases;
ALTER SYSTEM RESET outbox.format;
ALTER SYSTEM RESET outbox.ordering;
ALTER SYSTEM RESET outbox.retention;
ALTER SYSTEM RESET outbox.shutdown_timeout;
ALTER SYSTEM RESET outbox.poll_interval;
ALTER SYSTEM RESET outbox.max_in_flight_bytes;
ALTER SYSTEM RESET outbox.notify;
SELECT name, setting FROM pg_file_settings WHERE name LIKE 'outbox.%';
