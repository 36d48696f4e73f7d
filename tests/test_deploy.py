"""deploy/compose.yml: what it says is given to a server that is started by hand. No container is started here."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import program
from servers import MISSING, Server

psycopg = pytest.importorskip("psycopg", reason=MISSING)
ROOT = Path(__file__).resolve().parent.parent
PASSWORDS = ("", "wrong")


@pytest.fixture(scope="module")
def service():
    yaml = pytest.importorskip("yaml", reason="deploy/compose.yml is read with PyYAML, which comes with mkdocs")
    return yaml.safe_load((ROOT / "deploy/compose.yml").read_text())


@pytest.fixture(scope="module")
def server(postgres, service):
    """A server with the settings of the service. The image adds one line to pg_hba.conf and makes the database."""
    settings = service["services"]["registry"]["environment"]
    started = Server(fsync=True, initdb=shlex.split(settings["POSTGRES_INITDB_ARGS"]))
    with psycopg.connect(started.url(), autocommit=True) as connection:
        ((hba,),) = connection.execute("show hba_file").fetchall()
        connection.execute(f"create database {settings['POSTGRES_DB']} owner {settings['POSTGRES_USER']}")
        with open(hba, "a") as file:
            file.write("host all all all scram-sha-256\n")
        connection.execute("select pg_reload_conf()")
    yield started
    started.stop()


def test_the_service_states_what_the_image_understands_and_nothing_else(service):
    registry = service["services"]["registry"]
    assert set(registry["environment"]) == {
        "POSTGRES_USER", "POSTGRES_DB", "POSTGRES_PASSWORD_FILE", "POSTGRES_INITDB_ARGS",
    }  # fmt: skip
    assert registry["environment"]["POSTGRES_USER"] == "owner"
    assert registry["image"].startswith("postgres:")
    assert all(port.startswith("127.0.0.1:") for port in registry["ports"]), "another machine must be let in on purpose"
    assert [volume.partition(":")[2] for volume in registry["volumes"]] == ["/var/lib/postgresql/data"]
    assert {volume.partition(":")[0] for volume in registry["volumes"]} == set(service["volumes"])
    secrets = {f"/run/secrets/{name}" for name in registry["secrets"]}
    assert {registry["environment"]["POSTGRES_PASSWORD_FILE"]} == secrets
    for name in registry["secrets"]:
        file = f"deploy/{Path(service['secrets'][name]['file'])}"
        assert not (ROOT / file).exists(), "a password is in nobody's checkout"
        assert file in (ROOT / ".gitignore").read_text().splitlines()


def test_the_healthcheck_sees_the_server_and_its_end(service, server):
    kind, name, *arguments = service["services"]["registry"]["healthcheck"]["test"]
    assert (kind, name) == ("CMD", "pg_isready")
    assert server.code(name, *arguments) == 0
    assert server.code(name, *arguments, "--port=1") != 0


def test_pages_have_checksums_and_every_login_over_the_network_needs_its_password(service, server):
    database = service["services"]["registry"]["environment"]["POSTGRES_DB"]
    with psycopg.connect(server.url(database=database)) as connection:
        assert connection.execute("show data_checksums").fetchone() == ("on",)
        assert connection.execute("show password_encryption").fetchone() == ("scram-sha-256",)
        assert connection.execute("show fsync").fetchone() == ("on",)
        assert connection.execute("show synchronous_commit").fetchone() == ("on",)
        methods = connection.execute(
            "select distinct auth_method from pg_hba_file_rules where type <> 'local'"
        ).fetchall()
        assert methods == [("scram-sha-256",)]
    for password in PASSWORDS:
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(server.url(database=database).replace(server.password, password))


def test_the_first_day_of_a_registry_works_with_its_user_and_database(service, server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    url = server.url(database=service["services"]["registry"]["environment"]["POSTGRES_DB"])
    Path("wishes.csv").write_text("id,epsilon\n" + "".join(f"p{i},{1 + i % 2}\n" for i in range(40)))

    def registry(command, *arguments):
        found = program.epsilons("registry", command, url, *arguments, "--pepper", "pepper")
        found.succeeded()
        assert server.password not in found.out + found.err

    registry("create")
    registry("import", "wishes.csv", "--person", "id")
    with psycopg.connect(url, autocommit=True) as owner:
        owner.execute(program.epsilons("registry", "roles").out)
    registry("export", "-o", "a.json")
    registry("verify", "--since", "a.json")
    registry("backup", "-o", "copy.db")


def test_tests_without_postgresql_skip_and_the_summary_says_so():
    code = (
        "import sys, pytest; sys.path.insert(0, 'tests'); import servers; servers.programs = lambda: None; "
        "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', '-k', 'runner', 'tests/test_registry_roles.py']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout
    assert "needs PostgreSQL and psycopg: apt-get install postgresql" in done.stdout
    assert "passed" not in done.stdout
