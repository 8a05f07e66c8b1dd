
=head1 NAME

OutboxTest - what the TAP tests of outbox are written with

=head1 SYNOPSIS

  use strict;
  use warnings;
  use Test::More;
  use OutboxTest;

  my $receiver = start_receiver();
  my $node     = new_node('main', receiver => $receiver, conf => { 'outbox.workers' => 4 });
  create_extension($node);

  publish($node, n => 1000, aggregates => 200);
  $receiver->wait_requests(1000);
  wait_drained($node);
  is_deeply([ $receiver->overlaps_per_aggregate ], [], 'one at a time per aggregate');
  is_deeply([ $receiver->out_of_order ],           [], 'in order');
  is_deeply([ $receiver->duplicates ],             [], 'nothing twice');

  $receiver->rule(status => 500);
  my ($id) = publish($node, type => 'order', id => '42', event => 'order.created', payload => { total => 10 });
  wait_for('it failed once', sub { event_row($node, $id)->{attempts} >= 1 });
  reload($node, 'outbox.max_attempts' => 2);
  wait_sql($node, 'postgres', 'SELECT count(*) FROM outbox_dead_letters', 1);

  done_testing();

=head1 DESCRIPTION

The receiver's methods are in L<OutboxTest::Receiver>, its rules and log entries in F<test/receiver/receiver.pl>;
C<wait_for> is explained in L<OutboxTest::Wait>. Nodes are PostgreSQL::Test::Cluster objects: safe_psql, psql,
background_psql, stop, start, restart, kill9 and so on are theirs. All functions below are exported. Everything
called wait_* is a test point with a deadline (60 s, C<timeout =E<gt> n>; scaled by PG_TEST_TIMEOUT_DEFAULT / 180)
and, on failure, shows the end of the server logs. No test sleeps otherwise.

Where C<$db> is left out it is C<postgres>; where it is an option it is C<db>.

=head2 Starting

=over

=item start_receiver(%opt)

An L<OutboxTest::Receiver>; it ends with the test.

=item new_node($name, %opt)

An initialised and started cluster with outbox preloaded, UTF8 encoding, restart_after_crash on,
max_worker_processes 16. Options:

  receiver => $receiver      sets outbox.endpoint to its url
  endpoint => 'http://...'   or any other endpoint
  conf     => { name => value }   more settings (values are quoted for you; also overrides what is set here)
  fast     => 1              retry_base 50ms, retry_cap 500ms, poll_interval 200ms: for tests of failures
  start    => 0              not yet
  preload  => 0              without shared_preload_libraries
  init     => { allows_streaming => 1 }   for PostgreSQL::Test::Cluster's init

=item create_extension($node, $db, schema => $schema)

CREATE EXTENSION (and the schema if necessary). The other functions remember the schema.

=item create_db($node, $db)

=back

=head2 Settings

=over

=item set_conf($node, name => value, ...)

Writes postgresql.conf; undef removes a setting. In force after the next start or reload.

=item reload($node, name => value, ...)

set_conf, reload, and waits until new sessions have it. A value that is refused is not in force, the others are
(see wait_log); dies if the server takes nothing from the file.

=back

=head2 Events

=over

=item publish($node, %opt)

Inserts events in one transaction and returns their ids in order of insertion. Options:

  n => 1              how many
  type => 'order'     aggregate_type
  id => '1'           aggregate_id, the same for all
  aggregates => 1     or that many of them in turn: 1, 2, ...
  event => 'order.created'
  payload => {...}    or JSON text; default {"n": 1}, {"n": 2}, ...
  headers => {...}
  sql => 'SET LOCAL synchronous_commit = off'   executed before the INSERT, in its transaction
  db => 'postgres'

=item event_row($node, $id, db => ...)

The row as a hash (times as text), with its C<state>; undef if there is none.

=item count_pending, count_delivered, count_dead, count_discarded ($node, db => ...)

=item table($node, $name, db => ...)

The name with the schema of the extension: C<"s".outbox_events>.

=item query($node, $db, $sql)

Like safe_psql, but undef instead of an exception while the server is not there.

=back

=head2 Processes

=over

=item worker_pids($node, $db)

Of this database, or of all if $db is undef.

=item launcher_pid($node), postmaster_pid($node)

=item wait_workers($node, $n, db => ..., not => [pids])

Until that many workers run (in this database), none of which is one of those.

=back

=head2 Waiting

=over

=item wait_for($description, sub { ... }, timeout => 60)

=item wait_sql($node, $db, $query, $expected = 't', desc => ...)

Until the query gives this text; an error counts as not yet.

=item wait_drained($node, db => ...)

Nothing is pending.

=item wait_log($node, qr/.../, $offset, desc => ...)

Until it is in the server log behind the offset. Returns the new offset.

=item log_offset($node), log_since($node, $offset)

=back

=cut

package OutboxTest;

use strict;
use warnings;

# PostgreSQL's own modules, binaries and pg_regress, if the caller has not set them up. Must come first: those
# modules have INIT blocks and look at the environment.
BEGIN
{
    my $pg_config = $ENV{PG_CONFIG} || 'pg_config';
    my $have = grep { !ref && -e "$_/PostgreSQL/Test/Cluster.pm" } @INC;
    if (!$have || !$ENV{PG_REGRESS})
    {
        chomp(my $pgxs = `$pg_config --pgxs`);
        my $src = $pgxs =~ s{/makefiles/pgxs\.mk$}{}r;
        push @INC, "$src/test/perl" if !$have;
        $ENV{PG_REGRESS} ||= "$src/test/regress/pg_regress";
    }
    if (!grep { -x "$_/initdb" } split /:/, $ENV{PATH})
    {
        chomp(my $bin = `$pg_config --bindir`);
        $ENV{PATH} = "$bin:$ENV{PATH}";
    }

    # The files of a run go to tmp_check where prove was started, if that can be written.
    require Cwd;
    require File::Temp;
    my $here = Cwd::getcwd();
    $ENV{TESTDIR} ||= -w $here ? $here : File::Temp::tempdir('outbox_test_XXXXXX', TMPDIR => 1, CLEANUP => 1);
}

use Carp qw(croak);
use Exporter 'import';
use File::Basename qw(basename);
use File::Path qw(rmtree);
use JSON::PP;
use OutboxTest::Receiver;
use OutboxTest::Wait;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;

our @EXPORT = (
    qw(start_receiver new_node create_extension create_db set_conf reload),
    qw(publish event_row count_pending count_delivered count_dead count_discarded table query),
    qw(worker_pids launcher_pid postmaster_pid wait_workers),
    qw(wait_for wait_sql wait_drained wait_log log_offset log_since wait_seconds add_diagnostics));

my $json = JSON::PP->new->canonical->allow_nonref;
my %schema;    # node name => { database => schema of the extension }
my @nodes;

add_diagnostics(\&log_tails);

sub literal
{
    my ($text) = @_;
    return 'NULL' if !defined $text;
    utf8::encode($text) if $text =~ /[^\x00-\xff]/;
    return "'" . ($text =~ s/'/''/gr) . "'";
}

sub identifier { my ($name) = @_; return '"' . ($name =~ s/"/""/gr) . '"' }

# ---------------------------------------------------------------------------------------------------------
# Starting

sub start_receiver { my (%opt) = @_; return OutboxTest::Receiver->start(%opt) }

# A failed test leaves its data directory for inspection, and the server log is appended to.
sub clean_up_after_failed_run
{
    my ($name) = @_;
    my $test = basename($0) =~ s/\.[^.]+$//r;
    rmtree("$PostgreSQL::Test::Utils::tmp_check/t_${test}_${name}_data");
    unlink "$PostgreSQL::Test::Utils::log_path/${test}_${name}.log";
    return;
}

sub new_node
{
    my ($name, %opt) = @_;
    clean_up_after_failed_run($name) if !grep { $_->name eq $name } @nodes;
    my $node = PostgreSQL::Test::Cluster->new($name);
    $node->init(extra => [ '--encoding=UTF8', '--locale=C' ], %{ $opt{init} // {} });
    my %conf = (
        'max_worker_processes' => 16,
        'restart_after_crash'  => 'on',
        'log_min_messages'     => 'info',
        'log_statement'        => 'none',
        'log_line_prefix'      => '%m [%p] %b %q%a ',
        'log_checkpoints'      => 'off',
    );
    $conf{shared_preload_libraries} = 'outbox' if $opt{preload} // 1;
    my $endpoint = $opt{endpoint} // ($opt{receiver} ? $opt{receiver}->url('/') : undef);
    $conf{'outbox.endpoint'} = $endpoint if defined $endpoint;
    if ($opt{fast})
    {
        %conf = (
            %conf,
            'outbox.retry_base'    => '50ms',
            'outbox.retry_cap'     => '500ms',
            'outbox.poll_interval' => '200ms',
        );
    }
    set_conf($node, %conf, %{ $opt{conf} // {} });
    push @nodes, $node;
    $node->start if $opt{start} // 1;
    return $node;
}

sub create_db
{
    my ($node, $db) = @_;
    $node->safe_psql('postgres', 'CREATE DATABASE ' . identifier($db));
    return;
}

sub create_extension
{
    my ($node, $db, %opt) = @_;
    $db //= 'postgres';
    my $schema = $opt{schema};
    $node->safe_psql($db, defined $schema
        ? 'CREATE SCHEMA IF NOT EXISTS ' . identifier($schema) . '; CREATE EXTENSION outbox SCHEMA ' . identifier($schema)
        : 'CREATE EXTENSION outbox');
    $schema{ $node->name }{$db} = $schema // 'public';
    return;
}

sub table
{
    my ($node, $name, %opt) = @_;
    my $schema = $schema{ $node->name }{ $opt{db} // 'postgres' } // 'public';
    return identifier($schema) . ".$name";
}

# ---------------------------------------------------------------------------------------------------------
# Settings

# Inside quotes the file understands backslash escapes; control characters can be written no other way.
sub escape
{
    my ($value) = @_;
    return $value =~ s/\\/\\\\/gr =~ s/([\x01-\x1f\x7f])/sprintf '\\%03o', ord $1/ger;
}

sub set_conf
{
    my ($node, %conf) = @_;
    return if !%conf;
    my $file = $node->data_dir . '/postgresql.conf';
    my $names = join '|', map { quotemeta } keys %conf;
    my @lines = grep { !/^\s*(?:$names)\s*[= ]/i } split /^/m, slurp_file($file);
    for my $name (sort keys %conf)
    {
        next if !defined $conf{$name};
        push @lines, "$name = " . literal(escape($conf{$name})) . "\n";
    }
    open my $fh, '>', "$file.new" or croak "$file.new: $!";
    print {$fh} @lines;
    close $fh or croak "$file.new: $!";
    rename "$file.new", $file or croak "$file: $!";
    chmod 0600, $file;
    return;
}

sub reload
{
    my ($node, %conf) = @_;
    set_conf($node, %conf) if %conf;
    my $offset = log_offset($node);
    my $time   = 'SELECT pg_conf_load_time()';
    my $before = $node->safe_psql('postgres', $time);
    $node->reload;
    local $Test::Builder::Level = $Test::Builder::Level + 1;
    my $refused;
    wait_for(
        'reload',
        sub {
            ($refused) = log_since($node, $offset) =~ /^(.*contains errors; no changes were applied)/ms;
            return 1 if $refused;
            my $now = query($node, 'postgres', $time);
            return defined $now && $now ne $before;
        },
        quiet => 1) or croak 'reload failed';
    croak "the server does not take postgresql.conf: $refused" if $refused;
    return;
}

# ---------------------------------------------------------------------------------------------------------
# Events

sub publish
{
    my ($node, %opt) = @_;
    my %known = map { $_ => 1 } qw(n type id aggregates event payload headers sql db);
    for (keys %opt) { croak "publish: unknown option $_" if !$known{$_} }
    my $n  = $opt{n}  // 1;
    my $db = $opt{db} // 'postgres';
    my $id =
        defined $opt{id}         ? literal($opt{id})
      : defined $opt{aggregates} ? sprintf '((i - 1) %% %d + 1)::text', $opt{aggregates}
      :                            literal('1');
    my $payload =
        ref $opt{payload}     ? literal($json->encode($opt{payload})) . '::jsonb'
      : defined $opt{payload} ? literal($opt{payload}) . '::jsonb'
      :                         q(jsonb_build_object('n', i));
    my $headers = defined $opt{headers}
      ? literal(ref $opt{headers} ? $json->encode($opt{headers}) : $opt{headers}) . '::jsonb'
      : 'NULL';
    my $insert = sprintf
      'INSERT INTO %s (aggregate_type, aggregate_id, event_type, payload, headers) '
      . 'SELECT %s, %s, %s, %s, %s FROM generate_series(1, %d) AS i RETURNING id',
      table($node, 'outbox_events', db => $db), literal($opt{type} // 'order'), $id,
      literal($opt{event} // 'order.created'), $payload, $headers, $n;
    $insert = "BEGIN; $opt{sql}; $insert; COMMIT" if defined $opt{sql};
    my $out = $node->safe_psql($db, $insert);
    return $out =~ /^([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})$/mg;
}

sub event_row
{
    my ($node, $id, %opt) = @_;
    my $out = $node->safe_psql(
        $opt{db} // 'postgres',
        sprintf 'SELECT to_jsonb(e) || jsonb_build_object(\'state\', %s(e)) FROM %s e WHERE id = %s',
        table($node, 'outbox_state',  %opt),
        table($node, 'outbox_events', %opt),
        literal($id));
    return length $out ? JSON::PP->new->utf8->decode($out) : undef;
}

sub count_where
{
    my ($node, $where, %opt) = @_;
    return $node->safe_psql($opt{db} // 'postgres',
        'SELECT count(*) FROM ' . table($node, 'outbox_events', %opt) . " WHERE $where");
}

my %STATE = (
    pending   => q(processed_at IS NULL AND retry_after IS DISTINCT FROM 'infinity'),
    delivered => q(processed_at IS NOT NULL AND retry_after IS DISTINCT FROM 'infinity'),
    dead      => q(processed_at IS NULL AND retry_after = 'infinity'),
    discarded => q(processed_at IS NOT NULL AND retry_after = 'infinity'),
);

sub count_pending   { my ($node, %opt) = @_; return count_where($node, $STATE{pending},   %opt) }
sub count_delivered { my ($node, %opt) = @_; return count_where($node, $STATE{delivered}, %opt) }
sub count_dead      { my ($node, %opt) = @_; return count_where($node, $STATE{dead},      %opt) }
sub count_discarded { my ($node, %opt) = @_; return count_where($node, $STATE{discarded}, %opt) }

sub query
{
    my ($node, $db, $sql) = @_;
    my ($ret, $out) = eval { $node->psql($db, $sql) };
    return defined $ret && $ret == 0 ? $out : undef;
}

# ---------------------------------------------------------------------------------------------------------
# Processes

sub worker_pids
{
    my ($node, $db) = @_;
    my $out = query($node, 'postgres',
        q(SELECT pid FROM pg_stat_activity WHERE backend_type = 'outbox worker')
          . (defined $db ? ' AND datname = ' . literal($db) : '')
          . ' ORDER BY pid');
    return split /\n/, $out // '';
}

sub launcher_pid
{
    my ($node) = @_;
    my $pid = query($node, 'postgres', q(SELECT pid FROM pg_stat_activity WHERE backend_type = 'outbox launcher'));
    return $pid || undef;
}

sub postmaster_pid
{
    my ($node) = @_;
    my $file = $node->data_dir . '/postmaster.pid';
    return if !-e $file;
    my ($pid) = slurp_file($file) =~ /\A([0-9]+)/;
    return $pid;
}

sub wait_workers
{
    my ($node, $n, %opt) = @_;
    my %old = map { $_ => 1 } @{ delete $opt{not} // [] };
    my $db = delete $opt{db};
    my @now;
    local $Test::Builder::Level = $Test::Builder::Level + 1;
    return wait_for(
        delete $opt{desc} // "$n worker" . ($n == 1 ? ' runs' : 's run'),
        sub { @now = worker_pids($node, $db); return @now == $n && !grep { $old{$_} } @now },
        got => sub { "workers @now" },
        %opt);
}

# ---------------------------------------------------------------------------------------------------------
# Waiting

sub wait_sql
{
    my ($node, $db, $query, $expected, %opt) = @_;
    $expected //= 't';
    my ($ret, $out, $err) = ('', '', '');
    local $Test::Builder::Level = $Test::Builder::Level + 1;
    return wait_for(
        delete $opt{desc} // "$query is $expected",
        sub {
            ($ret, $out, $err) = $node->psql($db, $query);
            return $ret == 0 && $out eq $expected;
        },
        got => sub { length $err ? "$out $err" : $out },
        %opt);
}

sub wait_drained
{
    my ($node, %opt) = @_;
    my $db = delete $opt{db} // 'postgres';
    my $table = table($node, 'outbox_events', db => $db);
    local $Test::Builder::Level = $Test::Builder::Level + 1;
    return wait_sql($node, $db, "SELECT count(*) FROM $table WHERE $STATE{pending}", 0, desc => 'nothing is pending', %opt);
}

sub log_offset { my ($node) = @_; return (-s $node->logfile) // 0 }

sub log_since
{
    my ($node, $offset) = @_;
    return -e $node->logfile ? slurp_file($node->logfile, $offset // 0) : '';
}

sub wait_log
{
    my ($node, $regex, $offset, %opt) = @_;
    $offset //= 0;
    local $Test::Builder::Level = $Test::Builder::Level + 1;
    return wait_for(
        delete $opt{desc} // "the server log says $regex",
        sub {
            my $text = log_since($node, $offset);
            return $text =~ $regex ? $offset + length $text : 0;
        },
        %opt);
}

sub log_tails
{
    my $text = '';
    for my $node (@nodes)
    {
        my @lines = split /\n/, -e $node->logfile ? slurp_file($node->logfile) : '(no server log)';
        splice @lines, 0, @lines - 40 if @lines > 40;
        $text .= join "\n", 'end of the server log of ' . $node->name . ':', @lines, '';
    }
    return $text;
}

1;
