-- Roles of a registry in PostgreSQL (docs/registry.md#roles): who may do what. What nobody may do is in
-- rules_postgresql.sql, which `create` and `migrate` run. Run this once, as the owner of the registry's tables, after
-- `epsilons registry create`; running it again changes nothing.
--
--   epsilons_subject    states the own lifetime budget or withdrawal, and sees these statements
--   epsilons_runner     reserves, begins, settles and cancels runs of the projects in `member`
--   epsilons_officer    enrols people, carries out what they state, sets quotas, approves large refunds, reads and exports
--                       everything
--   epsilons_regulator  reads everything, verifies, changes nothing
--
-- They are groups. Give them to logins: create role anna login password '…'; grant epsilons_runner to anna;
-- insert into member values ('anna', 'cardiology');

begin;

do $$
declare name text;
begin
  foreach name in array array['epsilons_subject', 'epsilons_runner', 'epsilons_officer', 'epsilons_regulator'] loop
    if not exists (select from pg_roles where rolname = name) then
      execute format('create role %I nologin', name);
    end if;
    execute format('grant usage on schema %I to %I', current_schema(), name);
  end loop;
end $$;

-- Which projects a runner works for; which person a subject is; what subjects state.
-- applied: number of the event that carried it out; null while it waits; 0 if no account can keep it; -1 if a newer one
-- of the same subject replaced it; -2 if it would need a number of a new budget, and those for requests are used up.
create table if not exists member (role name, project text, primary key (role, project));
create table if not exists subject (role name primary key, number integer not null unique);
create table if not exists request (
  id bigint generated always as identity primary key,
  role name not null default current_user,
  time timestamptz not null default now(),
  epsilon double precision check (epsilon > 0 and epsilon <= 1000),  -- null: withdrawal
  delta double precision check (delta >= 1e-9 and delta < 1),
  applied integer,
  check ((epsilon is null) = (delta is null)));

-- One open request per subject: who thinks again changes it. Older tables may have more; the newest is kept open.
update request set applied = -1
  from (select role, max(id) as newest from request where applied is null group by role) as last
  where request.role = last.role and applied is null and id < newest;
create unique index if not exists one_open_request on request (role) where applied is null;

create or replace function request_is_the_only_one() returns trigger language plpgsql as $$
begin
  if exists (select from request where role = new.role and applied is null) then
    raise unique_violation using message = 'one request of yours waits already',
      hint = 'Change it: update request set epsilon = 2, delta = 1e-5 where applied is null. To withdraw: null, null.';
  end if;
  return new;
end $$;

-- What each role may do with whole tables.
grant select on fact, wish, cohort, person, page, quota, run, part, statement, event, head, member, subject, request
  to epsilons_officer, epsilons_regulator;
grant insert on wish, cohort, person, page, quota, statement, event, subject to epsilons_officer;
grant update (cohorts) on page to epsilons_officer;
grant update (share) on quota to epsilons_officer;
grant update (applied) on request to epsilons_officer;
grant update on head to epsilons_officer, epsilons_runner;
grant select on latest to epsilons_officer, epsilons_runner;

grant select on fact, wish, cohort, person, page, quota, head, run, part, member to epsilons_runner;
grant insert on cohort, page, run, part, event to epsilons_runner;
grant update (cohorts) on page to epsilons_runner;
grant update (state, charged, key, ledger, begun) on run to epsilons_runner;

grant select on subject, request to epsilons_subject;
grant insert (epsilon, delta), update (epsilon, delta) on request to epsilons_subject;

-- And with which rows.
alter table run enable row level security;
alter table part enable row level security;
alter table event enable row level security;
alter table member enable row level security;
alter table subject enable row level security;
alter table request enable row level security;

do $$
declare name text;
begin
  foreach name in array array['run', 'part', 'event', 'member', 'subject', 'request'] loop
    execute format('drop policy if exists reads on %I', name);
    execute format('create policy reads on %I for select to epsilons_officer, epsilons_regulator using (true)', name);
    execute format('drop policy if exists own on %I', name);
    execute format('drop policy if exists officers on %I', name);
  end loop;
  drop policy if exists changes on request;
  drop policy if exists states on request;
end $$;

create policy own on member for select to epsilons_runner using (role = current_user);
create policy own on run to epsilons_runner
  using (project in (select project from member)) with check (project in (select project from member));
create policy own on part to epsilons_runner using (run in (select id from run)) with check (run in (select id from run));
create policy own on event for insert to epsilons_runner with check (
  body::json ->> 'kind' in ('reserve', 'begin', 'settle', 'cancel') and body::json ->> 'run' in (select id from run));
create policy officers on event for insert to epsilons_officer with check (
  body::json ->> 'kind' in ('wish', 'enrol', 'change', 'withdraw', 'quota', 'approve'));
create policy own on subject for select to epsilons_subject using (role = current_user);
create policy officers on subject for insert to epsilons_officer with check (true);
create policy own on request for select to epsilons_subject using (role = current_user);
create policy states on request for insert to epsilons_subject with check (role = current_user and applied is null);
create policy changes on request for update to epsilons_subject
  using (role = current_user and applied is null) with check (role = current_user and applied is null);
create policy officers on request for update to epsilons_officer using (applied is null) with check (true);

do $$
begin
  -- It never looks into a temporary table of the caller's.
  execute format('alter function request_is_the_only_one() set search_path = %I, pg_temp', current_schema());
end $$;

create or replace trigger request_is_the_only_one before insert on request
  for each row execute function request_is_the_only_one();

commit;
