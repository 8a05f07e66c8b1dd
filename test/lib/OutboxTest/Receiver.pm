
=head1 NAME

OutboxTest::Receiver - starts the scriptable HTTP receiver and talks to it; needs no PostgreSQL

=head1 SYNOPSIS

  use OutboxTest::Receiver;

  my $r = OutboxTest::Receiver->start;              # or start_receiver() of OutboxTest
  $r->rule(path => '^/slow', delay_ms => [ 1, 20 ]);
  $r->rule(with => { 'ce-type' => '^poison$' }, status => 500);
  $r->rule(per => 'ce-id', times => 2, status => 503, headers => { 'Retry-After' => 1 });

  my $url = $r->url('/hook');                       # http://127.0.0.1:PORT/hook
  ...
  $r->wait_requests(10) or ...;                     # a test point
  is_deeply([ $r->overlaps_per_aggregate ], [], 'never two of one aggregate at once');
  is_deeply([ $r->out_of_order ],           [], 'in order');
  is_deeply([ $r->duplicates ],             [], 'nothing twice');
  is(($r->log)[0]{headers}{'ce-type'}[0], 'order.created');

=head1 DESCRIPTION

What rules can say and what a log entry holds is described in F<test/receiver/receiver.pl> (C<perldoc> it).
In rules, regexes may be strings or C<qr//>. The receiver ends with this object, at the latest with the test.

=head2 Life

=over

=item start(name => ..., port => ..., default => {...}, rules => [{...}, ...], store_body => bytes, seed => n, idle_timeout_ms => n, log => 1)

=item stop, pid, port, control_port

=item url($path), host ("127.0.0.1:PORT")

=back

=head2 Answers

=over

=item rule(%rule)

Adds a rule behind the others and returns its name; C<first =E<gt> 1> puts it before them.

=item set_rules({...}, {...}), clear_rules, remove_rule($name), default(%action)

clear_rules leaves the default, which is 200 unless C<default> said otherwise.

=item hang(%match)

Requests that match are not answered; returns the rule's name. Rules that are already there are tried later.

=item release(%action)

Answers the requests that hang now, with 200 or the given action; C<max =E<gt> n>, C<index =E<gt> [...]>
for only some. Rules stay. Returns how many.

=item stop_listening(close => 1), start_listening, mode('accept' | 'refuse' | 'no_read' | 'no_accept' | 'blackhole')

Connection refused, with C<close> for old connections too; or accepts and never reads; or connecting times out.

=item close_connections(which => 'idle' | 'all', reset => 0)

=back

=head2 What arrived

=over

=item log($filter)

The log entries in order of arrival. The filter is a sub that gets an entry (also in C<$_>), or a hash of
C<< entry field or header name => value or regex >>. Entries are up to date at the time of the call.

=item count($filter), requests, connections, in_flight, max_in_flight, hung, counts

=item clear_log

Forgets the log; counts, max_in_flight and connections begin again.

=item wait_requests($n, $filter, desc => ..., timeout => 60)

At least so many have arrived (and match). A test point; returns true if so. C<answered =E<gt> 1>: and were answered.

=item wait_until(sub { my ($r) = @_; ... }, $description, timeout => ...)

=item wait_hung($n), wait_idle

So many requests hang; nothing is in flight.

=back

=head2 What it means

These understand the formats cloudevents, json and payload.

=over

=item event_id($entry), aggregate($entry), sequence($entry), event($entry)

The last: the decoded JSON body.

=item ids($filter)

Event ids in order of arrival, each once.

=item duplicates($filter)

Ids that arrived more than once, as C<"id (2 times)">.

=item overlaps_per_aggregate($filter)

Aggregates that had two requests in flight at once, as text with the indexes.

=item first_arrivals($filter)

C<< { aggregate => [sequence, ...] } >>, of each event only its first arrival.

=item out_of_order($filter)

Aggregates whose first arrivals are not in ascending sequence, as text. Empty is good.

=back

=cut

package OutboxTest::Receiver;

use strict;
use warnings;

use Carp qw(croak);
use Cwd qw(abs_path);
use Fcntl qw(F_GETFD F_SETFD FD_CLOEXEC);
use File::Basename qw(dirname);
use HTTP::Tiny;
use IO::Handle;
use JSON::PP;
use MIME::Base64 qw(encode_base64);
use OutboxTest::Wait;
use POSIX ();
use Storable ();

my $program = abs_path(dirname(__FILE__) . '/../../receiver/receiver.pl');
my $json = JSON::PP->new->utf8->canonical->allow_nonref;
my %running;    # pid => 1, of this process's receivers

# ---------------------------------------------------------------------------------------------------------
# Life

sub start
{
    my ($class, %opt) = @_;
    my @args = ('--exit-with-parent', '--exit-on-stdin-eof');
    push @args, '--port', $opt{port} if $opt{port};
    push @args, '--store-body',      $opt{store_body}      if defined $opt{store_body};
    push @args, '--idle-timeout-ms', $opt{idle_timeout_ms} if defined $opt{idle_timeout_ms};
    push @args, '--seed',            $opt{seed}            if defined $opt{seed};
    push @args, '--no-log'                                 if defined $opt{log} && !$opt{log};
    push @args, '--default', $json->encode(wrap($opt{default})) if $opt{default};
    push @args, map { ('--rule', $json->encode(wrap($_))) } @{ $opt{rules} // [] };

    pipe(my $out_r, my $out_w) or croak "pipe: $!";
    pipe(my $in_r,  my $in_w)  or croak "pipe: $!";
    my $pid = fork() // croak "fork: $!";
    if ($pid == 0)
    {
        # Only descriptors 0, 1, 2 reach the receiver: the pipes are close-on-exec, as everything of Perl's is.
        POSIX::dup2(fileno $in_r,  0);
        POSIX::dup2(fileno $out_w, 1);
        no warnings 'exec';
        exec {$^X} $^X, $program, @args;
        POSIX::_exit(127);
    }
    close $in_r;
    close $out_w;
    my $self = bless {
        name => $opt{name} // 'receiver', pid => $pid, owner => $$, stdin => $in_w, stdout => $out_r,
        http => HTTP::Tiny->new(timeout => wait_seconds(30), keep_alive => 1),
    }, $class;
    $running{$pid} = 1;

    my $line = '';
    my $bits = '';
    vec($bits, fileno($out_r), 1) = 1;
    while ($line !~ /\n/)
    {
        my $ready = select(my $r = $bits, undef, undef, wait_seconds(30));
        next if $ready < 0 && $!{EINTR};
        croak 'the receiver did not start in time' if !$ready;
        sysread($out_r, $line, 256, length $line) or croak 'the receiver failed to start';
    }
    $line =~ /^port=([0-9]+) control=([0-9]+)$/m or croak "the receiver said: $line";
    @$self{qw(port control_port)} = ($1, $2);
    $self->forget;
    {
        require Scalar::Util;
        Scalar::Util::weaken(my $weak = $self);
        add_diagnostics(sub { $weak && $weak->{pid} ? $weak->describe : '' });
    }
    return $self;
}

sub stop
{
    my ($self) = @_;
    my $pid = delete $self->{pid} or return;
    return if $self->{owner} != $$;    # a fork of the test does not own it
    delete $running{$pid};
    kill 'TERM', $pid;
    close $self->{stdin};
    local ($?, $!);
    waitpid $pid, 0;
    return;
}

sub DESTROY { my ($self) = @_; local ($@, $?, $!); $self->stop; return }

END
{
    local $?;
    kill 'TERM', $_ for keys %running;
}

sub pid          { return $_[0]{pid} }
sub port         { return $_[0]{port} }
sub control_port { return $_[0]{control_port} }
sub host         { return "127.0.0.1:$_[0]{port}" }

sub url
{
    my ($self, $path) = @_;
    return 'http://' . $self->host . ($path // '/');
}

sub describe
{
    my ($self) = @_;
    my @last = $self->log;
    splice @last, 0, @last - 5 if @last > 5;
    return "$self->{name} on port $self->{port}: " . $json->encode($self->counts) . join '', map {
        sprintf "\n  #%d %s %s key=%s rule=%s status=%s outcome=%s", $_->{index}, $_->{method}, $_->{path},
          ($_->{key} // '') =~ s/\0/ /gr, $_->{rule}, $_->{status} // '-', $_->{outcome} // 'in flight'
    } @last;
}

# ---------------------------------------------------------------------------------------------------------
# Talking to the control port

# JSON for the receiver: bytes it cannot hold go as base64, regexes as text.
sub wrap
{
    my ($v) = @_;
    return { map { $_ => wrap($v->{$_}) } keys %$v } if ref $v eq 'HASH';
    return [ map { wrap($_) } @$v ]                  if ref $v eq 'ARRAY';
    return $v                                        if !defined $v || JSON::PP::is_bool($v);
    $v = "$v" if ref $v;
    return $v if $v !~ /[^\x00-\x7f]/;
    utf8::encode($v) if $v =~ /[^\x00-\xff]/;
    return { base64 => encode_base64($v, '') };
}

sub control
{
    my ($self, $command, $body) = @_;
    croak 'the receiver is not running' if !$self->{pid};
    my $url = "http://127.0.0.1:$self->{control_port}$command";
    my $response = $body
      ? $self->{http}->post($url, { content => $json->encode(wrap($body)) })
      : $self->{http}->get($url);
    croak "$self->{name}: $command: $response->{status} $response->{content}" if !$response->{success};
    return Storable::thaw($response->{content}) if $command =~ /format=storable/;
    return $json->decode($response->{content});
}

sub rule         { my ($self, %rule) = @_; return $self->control('/rules/add', \%rule)->{rules}[0] }
sub set_rules    { my ($self, @rules) = @_; return @{ $self->control('/rules', { rules => \@rules })->{rules} } }
sub clear_rules  { my ($self) = @_; $self->control('/rules/clear', {}); return }
sub remove_rule  { my ($self, $name) = @_; return $self->control('/rules/remove', { name => $name })->{removed} }
sub default      { my ($self, %action) = @_; $self->control('/default', \%action); return }
sub hang         { my ($self, %match) = @_; return $self->rule(%match, hang => 1, first => 1) }
sub release      { my ($self, %action) = @_; return $self->control('/release', \%action)->{released} }
sub mode         { my ($self, $mode) = @_; return $self->control('/mode', { mode => $mode })->{mode} }

sub start_listening { my ($self) = @_; return $self->mode('accept') }

sub stop_listening
{
    my ($self, %opt) = @_;
    $self->mode('refuse');
    $self->close_connections if $opt{close};
    return;
}

sub close_connections
{
    my ($self, %opt) = @_;
    return $self->control('/close', \%opt)->{closed};
}

sub counts        { my ($self) = @_; return $self->control('/counts') }
sub requests      { return $_[0]->counts->{requests} }
sub connections   { return $_[0]->counts->{connections} }
sub in_flight     { return $_[0]->counts->{in_flight} }
sub max_in_flight { return $_[0]->counts->{max_in_flight} }
sub hung          { return $_[0]->counts->{hung} }

# ---------------------------------------------------------------------------------------------------------
# The log

sub forget
{
    my ($self) = @_;
    @$self{qw(entries at gen change)} = ([], {}, 0, 0);
    return;
}

sub clear_log
{
    my ($self) = @_;
    $self->control('/clear', {});
    $self->forget;
    return;
}

# Brings our copy of the log up to date; only what is new or changed is transferred.
sub refresh
{
    my ($self) = @_;
    my $news = $self->control("/log?change=$self->{change}&gen=$self->{gen}&format=storable");
    $self->forget if $news->{gen} != $self->{gen};
    for my $e (@{ $news->{entries} })
    {
        my $at = $self->{at}{ $e->{index} };
        if (defined $at)
        {
            $self->{entries}[$at] = $e;
        }
        else
        {
            $self->{at}{ $e->{index} } = @{ $self->{entries} };
            push @{ $self->{entries} }, $e;
        }
    }
    @$self{qw(gen change)} = @$news{qw(gen change)};
    return $self->{entries};
}

sub matches
{
    my ($e, $filter) = @_;
    if (ref $filter eq 'CODE')
    {
        local $_ = $e;
        return $filter->($e);
    }
    for my $name (keys %$filter)
    {
        my $want = $filter->{$name};
        my @have =
            exists $e->{headers}{ lc $name } ? @{ $e->{headers}{ lc $name } }
          : defined $e->{$name}              ? $e->{$name}
          :                                    ();
        return 0 if !defined $want ? @have : !grep { ref $want ? $_ =~ $want : $_ eq $want } @have;
    }
    return 1;
}

sub log    ## no critic
{
    my ($self, $filter) = @_;
    my $entries = $self->refresh;
    return @$entries if !$filter;
    return grep { matches($_, $filter) } @$entries;
}

sub count
{
    my ($self, $filter) = @_;
    return scalar(my @list = $self->log($filter));
}

sub wait_requests
{
    my ($self, $n, @rest) = @_;
    my $filter = @rest % 2 ? shift @rest : undef;
    my %opt  = @rest;
    my $have = 0;
    local $Test::Builder::Level = $Test::Builder::Level + 1;
    return wait_for(
        delete $opt{desc} // "$n request" . ($n == 1 ? '' : 's') . " arrived at the $self->{name}",
        sub {
            my @list = $self->log($filter);
            @list = grep { defined $_->{ended} } @list if $opt{answered};
            $have = @list;
            return $have >= $n;
        },
        got => sub { "$have" },
        %opt);
}

sub wait_until
{
    my ($self, $condition, $description, %opt) = @_;
    local $Test::Builder::Level = $Test::Builder::Level + 1;
    return wait_for($description // "the $self->{name} has what is expected", sub { $condition->($self) }, %opt);
}

sub wait_hung
{
    my ($self, $n, %opt) = @_;
    return $self->wait_until(sub { $self->hung >= $n }, "$n hanging at the $self->{name}", got => sub { $self->hung }, %opt);
}

sub wait_idle
{
    my ($self, %opt) = @_;
    return $self->wait_until(sub { !$self->in_flight }, "nothing in flight at the $self->{name}", %opt);
}

# ---------------------------------------------------------------------------------------------------------
# What it means

sub header
{
    my ($e, $name) = @_;
    my $values = $e->{headers}{$name};
    return $values ? $values->[0] : undef;
}

# Also callable on entries as a function: these ignore the receiver.
sub event
{
    my ($self, $e) = @_;
    return defined $e->{body} && length $e->{body} ? eval { $json->decode($e->{body}) } : undef;
}

sub field
{
    my ($self, $e, $name, @headers) = @_;
    for my $header (@headers)
    {
        my $value = header($e, $header);
        return $value if defined $value;
    }
    my $body = $self->event($e);
    return ref $body eq 'HASH' ? $body->{$name} : undef;
}

sub event_id { my ($self, $e) = @_; return $self->field($e, 'id',  qw(ce-id outbox-event-id idempotency-key)) }
sub sequence { my ($self, $e) = @_; return $self->field($e, 'seq', qw(ce-sequence outbox-sequence)) }

sub aggregate
{
    my ($self, $e) = @_;
    return if !defined $e->{key};
    my ($what, $id) = split /\0/, $e->{key};
    return $what if defined header($e, 'ce-subject');    # type/id already; the partition key repeats the id
    return "$what/$id";
}

sub ids
{
    my ($self, $filter) = @_;
    my %seen;
    return grep { defined && !$seen{$_}++ } map { $self->event_id($_) } $self->log($filter);
}

sub duplicates
{
    my ($self, $filter) = @_;
    my (%n, @order);
    for my $e ($self->log($filter))
    {
        my $id = $self->event_id($e) // next;
        push @order, $id if !$n{$id}++;
    }
    return map { "$_ ($n{$_} times)" } grep { $n{$_} > 1 } @order;
}

sub overlaps_per_aggregate
{
    my ($self, $filter) = @_;
    my @bad;
    for my $e ($self->log($filter))
    {
        push @bad, $self->aggregate($e) . ": #$e->{index} while #" . join(', #', @{ $e->{overlaps} }) if $e->{overlaps};
    }
    return @bad;
}

sub first_arrivals
{
    my ($self, $filter) = @_;
    my (%seen, %order);
    for my $e ($self->log($filter))
    {
        my $id = $self->event_id($e) // next;
        next if $seen{$id}++;
        push @{ $order{ $self->aggregate($e) // '' } }, $self->sequence($e);
    }
    return \%order;
}

sub out_of_order
{
    my ($self, $filter) = @_;
    my $order = $self->first_arrivals($filter);
    my @bad;
    for my $aggregate (sort keys %$order)
    {
        my $last;
        for my $seq (map { defined ? 0 + $_ : undef } @{ $order->{$aggregate} })
        {
            if (!defined $seq)
            {
                push @bad, "$aggregate: no sequence";
                last;
            }
            push @bad, "$aggregate: $seq after $last" if defined $last && $seq <= $last;
            $last = $seq;
        }
    }
    return @bad;
}

1;
