# The throwaway servers of the bench: a PostgreSQL cluster with durable defaults, reachable only
# over a socket in the temporary directory, and an nginx that answers every POST with an empty 200.
package Bench::Servers;

use strict;
use warnings;

use IO::Socket::INET;

use Bench::Host;

my $CONFIGURATION = <<'END';
listen_addresses = ''
unix_socket_permissions = 0700
shared_buffers = 256MB
fsync = on
synchronous_commit = on
full_page_writes = on
max_wal_size = 2GB
checkpoint_timeout = 30min
log_line_prefix = '%m [%p] %b '
END

my $NGINX = <<'END';
daemon off;
worker_processes 1;
pid %1$s/nginx.pid;
error_log %1$s/log/nginx-error;
events { worker_connections 1024; }
http {
    access_log off;
    client_body_temp_path %1$s/nginx-body;
    proxy_temp_path %1$s/nginx-proxy;
    fastcgi_temp_path %1$s/nginx-fastcgi;
    uwsgi_temp_path %1$s/nginx-uwsgi;
    scgi_temp_path %1$s/nginx-scgi;
    keepalive_requests 1000000000;
    keepalive_timeout 3600s;
    server {
        listen 127.0.0.1:%2$d backlog=1024;
        location = /stub_status { stub_status; }
        location / { return 200; }
    }
}
END

sub new {
    my ($class, $host, %option) = @_;
    my $self = bless { host => $host, bin => $option{bin}, socket => $host->directory('s') }, $class;
    $self->_start_postgres($option{settings} // '');
    $self->_start_nginx($option{nginx});
    return $self;
}

sub _start_postgres {
    my ($self, $settings) = @_;
    my ($host, $bin) = @$self{qw(host bin)};
    my $data = $host->path('data');
    $host->command('initdb', "$bin/initdb", '-D', $data, qw(-U postgres -A trust -E UTF8),
        '--locale=C', '--no-instructions');
    $host->write_file('data/postgresql.conf',
        $CONFIGURATION . "unix_socket_directories = '$self->{socket}'\n" . $settings);
    $self->{postgres} = $host->spawn('postgres', "$bin/postgres", '-D', $data);
    Bench::Host::wait_until('PostgreSQL accepts connections', 60, sub { $self->_is_up });
    return;
}

sub _is_up {
    my ($self) = @_;
    my $host = $self->{host};
    die 'PostgreSQL did not start: ' . $host->complaint($self->{postgres}) . "\n"
      if $host->has_ended($self->{postgres});
    return eval { $self->query('postgres', 'SELECT 1') };
}

sub _start_nginx {
    my ($self, $nginx) = @_;
    my $host = $self->{host};
    $self->{port} = Bench::Host::free_port();
    my $file = $host->write_file('nginx.conf', sprintf $NGINX, $host->path(''), $self->{port});
    $self->{nginx} = $host->spawn('nginx', $nginx, '-p', $host->path(''), '-c', $file,
        '-e', $host->path('log/nginx-error'));
    Bench::Host::wait_until(
        'nginx accepts connections',
        10,
        sub { IO::Socket::INET->new(PeerAddr => '127.0.0.1', PeerPort => $self->{port}) });
    return;
}

sub port { return $_[0]{port} }
sub url  { return "http://127.0.0.1:$_[0]{port}/events" }

sub conninfo {
    my ($self, $database) = @_;
    return "host=$self->{socket} user=postgres dbname=$database";
}

sub psql {
    my ($self, $database, @arguments) = @_;
    return $self->{host}->command('psql', "$self->{bin}/psql", '-XAtq', '-v', 'ON_ERROR_STOP=1',
        '-d', $self->conninfo($database), @arguments);
}

# The answer to one query, without the last newline; several statements are not one transaction.
sub query {
    my ($self, $database, @statements) = @_;
    my $answer = $self->psql($database, map { ('-c', $_) } @statements);
    chomp $answer;
    return $answer;
}

# What has to be in force for a figure to mean anything; read back from the server.
sub setting { my ($self, $name) = @_; return $self->query('postgres', "SHOW $name") }

# The relay of the extension is switched by configuration and reload, as an operator would.
sub configure {
    my ($self, %setting) = @_;
    $self->query(
        'postgres',
        (map { "ALTER SYSTEM SET $_ = '$setting{$_}'" } sort keys %setting),
        'SELECT pg_reload_conf()');
    return;
}

# The relay's workers of one database.
sub worker_pids {
    my ($self, $database) = @_;
    return split /\n/, $self->query('postgres',
        'SELECT pid FROM pg_stat_activity '
          . "WHERE backend_type = 'outbox worker' AND datname = '$database' ORDER BY pid");
}

sub stop_relay {
    my ($self, $database) = @_;
    $self->configure('outbox.databases' => '');
    Bench::Host::wait_until('the outbox workers stop', 30, sub { $self->worker_pids($database) == 0 });
    return;
}

1;
