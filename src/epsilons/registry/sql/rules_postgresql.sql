-- What PostgreSQL refuses, whoever asks (docs/registry.md#events): a blank line ends a statement. Each event must follow
-- from those before it, and each row from its event in the same transaction. The database cannot unpack rosters: who
-- fits into a lifetime budget, and the hashes of rosters, are for `verify`.

drop trigger if exists event_is_next on event;

drop trigger if exists event_is_kept on event;

drop trigger if exists head_is_last_event on head;

drop trigger if exists run_goes_forward on run;

create index event_run on event ((body::json ->> 'run'));

-- The time of the last event, if it is one: a runner may not read events.
create view latest as select body::json ->> 'time' as time from event join head using (number, hash)
  where body::json ->> 'time' ~ '^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00$'
    and body::json ->> 'time' < to_char(now() at time zone 'UTC' + interval '1 day', 'YYYY-MM-DD"T"HH24:MI:SS');

alter table page add constraint page_size check (length(cohorts) <= 80000) not valid;

alter table cohort add constraint cohort_size check (length(sums) = 128) not valid;

alter table part add constraint part_size check (length(rows) <= 40000 and page >= 0) not valid;

alter table statement add constraint statement_size check (length(rows) <= 40000 and page >= 0) not valid;

-- The form of an event as this library writes it: its fields in order, and no text written in two ways.
create function event_form(kind text) returns text language sql immutable as $$
  select '^\{' || replace(replace(replace(replace(replace(replace(replace(replace(
    case kind
      when 'limit' then '"kind": K, "refund": F, "time": T'
      when 'migrate' then '"kind": K, "schema": "3", "time": T, "was": "[12]"'
      when 'wish' then '"delta": F, "epsilon": F, "home": F, "id": N, "kind": K, "time": T'
      when 'enrol' then '"digest": "H", "first": N, "kind": K, "names": "H", "people": N, "time": T'
      when 'change' then '"digest": "H", "kind": K, "people": N, "time": T'
      when 'withdraw' then '"digest": "H", "kind": K, "people": N, "time": T'
      when 'quota' then '"kind": K, "project": S, "share": F, "time": T'
      when 'reserve' then '"digest": "H", "kind": K, "project": S, "run": S, "time": T, "what": S'
      when 'begin' then '"key": "H", "kind": K, "ledger": "(H)?", "previous": (null|"H"), "run": S, "time": T'
      when 'settle' then '"charged": L, "key": "H", "kind": K, "ledger": "(H)?", "run": S, "time": T'
      when 'cancel' then '"kind": K, "run": S, "time": T'
      when 'approve' then '"charged": L, "kind": K, "ledger": "(H)?", "run": S, "time": T'
      when 'quarantine' then '"events": L, "kind": K, "reason": S, "time": T'
    end, 'K', '"' || kind || '"'), 'F', '[-+.e0-9]+'), 'H', '[0-9a-f]{64}'), 'L', '\[N(, N)*\]'),
    'N', '(0|[1-9][0-9]{0,11})'),
    'S', '"([ !#-\[\]-~]|\\["\\]|\\u(?!00[0-9]|00a[0d]|200|202[89a-f]|20[56]|3000|e|f[0-8]|feff)[0-9a-f]{4})*"'),
    'T', '"\d{4}-\d\d-\d\d@([01]\d|2[0-3]):[0-5]\d:[0-5]\d\+00:00"'), '@', 'T') || '\}$'
$$;

-- The last event, if this transaction wrote it.
create function said() returns json language sql security definer as $$
  select body::json from event join head using (number, hash)
    where event.xmin::text::bigint = txid_current() % (1::bigint << 32)
$$;

-- Whether the rows that follow an event are there.
create function is_done(at integer, said json) returns boolean language sql security definer as $$
  select case said ->> 'kind'
    when 'migrate' then exists (select from fact where name = 'schema' and value = said ->> 'schema')
    when 'limit' then exists (select from fact where name = 'refund' and value = said ->> 'refund')
    when 'wish' then exists (select from wish where id = (said ->> 'id')::integer)
    when 'enrol' then (select count(*) from person) = (said ->> 'first')::bigint + (said ->> 'people')::bigint
      and exists (select from statement where event = at)
    when 'change' then exists (select from statement where event = at)
    when 'withdraw' then exists (select from statement where event = at)
    when 'quota' then exists (select from quota where project = said ->> 'project'
      and share = (said ->> 'share')::double precision)
    when 'begin' then exists (select from run where id = said ->> 'run' and state = 'running'
      and key = said ->> 'key' and begun = said ->> 'ledger' and charged is null and ledger is null)
    when 'settle' then exists (select from run where id = said ->> 'run' and state = 'settled'
      and key = said ->> 'key' and charged = said ->> 'charged' and ledger = said ->> 'ledger')
    when 'cancel' then exists (select from run where id = said ->> 'run' and state = 'cancelled'
      and key is null and begun is null and ledger = '' and not charged ~ '[1-9]'
      and json_array_length(charged::json) = json_array_length(plan::json -> 'steps'))
    else true end
$$;

-- The share of a run's steps that is given back; null if more or other steps are charged than it has.
create function given_back(charged json, plan text) returns double precision language sql immutable as $$
  select case when bool_and(coalesce(c.n::bigint <= s.n::bigint, false))
    then 1 - coalesce(sum(c.n::bigint)::double precision / nullif(sum(s.n::bigint), 0)::double precision, 1) end
  from json_array_elements_text(charged) with ordinality c(n, i)
    full join json_array_elements_text(plan::json -> 'steps') with ordinality s(n, i) using (i)
$$;

-- Whether a table has rates, noises and steps of one shape and in their ranges.
create function is_table(plan json) returns boolean language sql immutable as $$
  select (select array_agg(k order by k) from json_object_keys(plan) k) = array['noises', 'rates', 'steps']
    and json_array_length(plan -> 'steps') between 1 and least(json_array_length(plan -> 'rates'), 20000)
    and json_array_length(plan -> 'noises') = json_array_length(plan -> 'rates')
    and json_array_length(plan -> 'steps') = json_array_length(plan -> 'rates')
    and (select bool_and(s::text ~ '^(0|[1-9][0-9]{0,11})$') from json_array_elements(plan -> 'steps') s)
    and (select count(distinct json_array_length(p)) = 1 and min(json_array_length(p)) between 1 and 32768
      from (select json_array_elements(plan -> 'rates') union all select json_array_elements(plan -> 'noises')) _(p))
    and (select bool_and(coalesce(json_typeof(v) = 'number' and (v #>> '{}')::double precision between 0 and 1, false))
      from json_array_elements(plan -> 'rates') p, json_array_elements(p) v)
    and (select bool_and(json_typeof(v) = 'null'
        or coalesce(json_typeof(v) = 'number' and (v #>> '{}')::double precision > 0, false))
      from json_array_elements(plan -> 'noises') p, json_array_elements(p) v)
$$;

create function event_is_legal() returns trigger language plpgsql security definer as $$
declare
  last record; said json; r record; number_of text; most double precision; is_right boolean;
  orders constant double precision[] := array[2, 2.5, 3, 4, 5, 6, 8, 10, 12, 15, 18, 24, 32, 44, 64, 96];
begin
  if tg_op = 'INSERT' then
    select number, hash into last from head;
    is_right := new.number = last.number + 1 and new.previous = last.hash
      and new.hash = encode(sha256(convert_to(new.previous || new.body, 'UTF8')), 'hex');
  end if;
  if is_right is not true then
    raise check_violation using message = 'Events are only ever added, each after the last one.';
  end if;
  if new.number = 1 then
    return new;  -- of create, by the owner
  end if;
  said := new.body::json;
  if length(new.body) > 65536 or new.body ~ event_form(said ->> 'kind') is not true
    or length(said ->> 'run') > 200 or length(said ->> 'project') > 200 or length(said ->> 'what') > 200
    or length(said ->> 'reason') > 500
    or (said ->> 'time')::timestamptz > now() + interval '5 minutes'
    or said ->> 'time' < (select time from latest) then
    raise check_violation using message = 'This event has not the fields and the time of its kind.';
  end if;
  foreach number_of in array array['refund', 'share', 'epsilon', 'delta', 'home'] loop  -- written as Python does
    if said ->> number_of not in ((said ->> number_of)::double precision::text,
      (said ->> number_of)::double precision::text || '.0') or said ->> number_of !~ '[.e]' then
      raise check_violation using message = 'This event has not the fields and the time of its kind.';
    end if;
  end loop;
  if said ->> 'kind' <> 'migrate'  -- before it, other rules held
    and is_done(last.number, (select body::json from event where number = last.number)) is not true then
    raise check_violation using message = 'The rows of the event before are missing.';
  end if;
  select * into r from run where id = said ->> 'run' and (said ->> 'kind' = 'reserve') <> exists (
    select from event where body::json ->> 'run' = id and body::json ->> 'kind' = 'reserve');
  most := coalesce((select value::double precision from fact where name = 'refund'), 1);
  is_right := case said ->> 'kind'
    when 'migrate' then (select value from fact where name = 'schema') = said ->> 'was'
    when 'limit' then (said ->> 'refund')::double precision between 0 and 1
    when 'wish' then (said ->> 'id')::integer = (select coalesce(max(id), 0) + 1 from wish)
      and (said ->> 'id')::integer < 32768
      and (said ->> 'epsilon')::double precision > 0 and (said ->> 'epsilon')::double precision <= 1000
      and (said ->> 'delta')::double precision >= 1e-9 and (said ->> 'delta')::double precision < 1
      and (said ->> 'home')::double precision = any (orders)
      and exists (select from unnest(orders) a where (said ->> 'epsilon')::double precision > 3e-12 + ln(1 - 1 / a)
        - (ln((said ->> 'delta')::double precision * case when a = (said ->> 'home')::double precision then 0.9
          else 0.1 / 15 end) + ln(a)) / (a - 1))  -- some run fits, as in people.check_wishes
    when 'enrol' then (said ->> 'first')::bigint = (select count(*) from person) and (said ->> 'people')::bigint >= 1
    when 'change' then (said ->> 'people')::bigint >= 1
    when 'withdraw' then (said ->> 'people')::bigint >= 1
    when 'quota' then (said ->> 'share')::double precision > 0 and (said ->> 'share')::double precision <= 1
    when 'reserve' then r.state = 'reserved' and r.digest = said ->> 'digest' and r.kind = said ->> 'what'
      and r.project = said ->> 'project' and coalesce(r.charged, r.key, r.ledger, r.begun) is null
      and length(r.plan) <= 16777216 and is_table(r.plan::json)
      and exists (select from part where run = r.id)
    when 'begin' then (r.state = 'reserved' and r.key is null and said ->> 'previous' is null
        or r.state = 'running' and said ->> 'previous' = r.key and said ->> 'ledger' = coalesce(r.begun, said ->> 'ledger'))
      and not exists (select from event where body::json ->> 'run' = r.id and body::json ->> 'key' = said ->> 'key')
    when 'settle' then r.state = 'running' and said ->> 'key' = r.key
      and given_back(said -> 'charged', r.plan) <= case when said ->> 'ledger' = '' then 0 else 1 end
    when 'cancel' then r.state = 'reserved'
    when 'approve' then r.state in ('reserved', 'running') and given_back(said -> 'charged', r.plan) is not null
    when 'quarantine' then (select bool_and(n < new.number and n > before)
        from (select n::bigint as n, coalesce(lag(n::bigint) over (order by i), 0) as before
          from json_array_elements_text(said -> 'events') with ordinality _(n, i)) _)
    else false end;
  if is_right is not true then
    raise check_violation using message = 'This event does not follow from those before it.';
  end if;
  if said ->> 'kind' in ('settle', 'cancel') and most < coalesce(given_back(said -> 'charged', r.plan), 1)
    and not exists (select from event where body::json ->> 'run' = r.id and body::json ->> 'kind' = 'approve'
      and body::json ->> 'ledger' = coalesce(said ->> 'ledger', '')
      and (body::json ->> 'charged' = said ->> 'charged'
        or said ->> 'kind' = 'cancel' and body::json ->> 'charged' !~ '[1-9]')) then
    raise check_violation using message = 'This gives back more steps than the owner of the registry allows without an '
      'approval. An officer approves it: epsilons registry approve URL RUN';
  end if;
  return new;
end $$;

create function event_is_done() returns trigger language plpgsql security definer as $$
begin
  if not exists (select from head where number > new.number)
    and (not exists (select from head where number = new.number) or is_done(new.number, new.body::json) is not true) then
    raise check_violation using message = 'An event comes with its rows, and the head is the last event.';
  end if;
  return new;
end $$;

create function head_follows() returns trigger language plpgsql security definer as $$
begin
  if tg_op = 'UPDATE' and new.one = old.one and new.number = old.number + 1
    and exists (select from event where number = new.number and hash = new.hash) then
    return new;
  end if;
  raise check_violation using message = 'The head is the last event.';
end $$;

-- Rows change with their event alone, or with the owner's migration or quarantine.
create function row_follows() returns trigger language plpgsql security definer as $$
declare
  said json := said(); is_right boolean := said ->> 'kind' in ('migrate', 'quarantine') and tg_op <> 'TRUNCATE';
  row json; old_row json;
begin
  if is_right is not true and tg_op in ('INSERT', 'UPDATE') then
    row := to_json(new);
    is_right := case tg_op || ' ' || tg_table_name
      when 'INSERT fact' then said ->> 'kind' in ('create', 'limit') and row ->> 'value' = said ->> (row ->> 'name')
      when 'INSERT wish' then said ->> 'kind' = 'wish' and (row ->> 'id', (row ->> 'epsilon')::double precision,
          (row ->> 'delta')::double precision, (array[2, 2.5, 3, 4, 5, 6, 8, 10, 12, 15, 18, 24, 32, 44, 64,
          96])[(row ->> 'home')::integer + 1]::double precision)
        = (said ->> 'id', (said ->> 'epsilon')::double precision, (said ->> 'delta')::double precision,
          (said ->> 'home')::double precision)
      when 'INSERT quota' then said ->> 'kind' = 'quota' and row ->> 'project' = said ->> 'project'
        and (row ->> 'share')::double precision = (said ->> 'share')::double precision
      when 'INSERT statement' then said ->> 'kind' in ('enrol', 'change', 'withdraw')
        and (row ->> 'event')::integer = (select number from head)
      when 'INSERT part' then exists (select from run where id = row ->> 'run' and state = 'reserved')
        and not exists (select from event where body::json ->> 'run' = row ->> 'run')
      when 'UPDATE fact' then said ->> 'kind' = 'limit' and row ->> 'name' = 'refund'
        and row ->> 'value' = said ->> 'refund'
      when 'UPDATE quota' then said ->> 'kind' = 'quota' and row ->> 'project' = said ->> 'project'
        and (row ->> 'share')::double precision = (said ->> 'share')::double precision
      when 'UPDATE run' then said ->> 'run' = row ->> 'id' and said ->> 'kind' in ('begin', 'settle', 'cancel')
        and is_done(0, said) else false end;
    if tg_op = 'UPDATE' then  -- what stays
      old_row := to_json(old);
      is_right := is_right and (select bool_and(row ->> name is not distinct from old_row ->> name) from unnest(
        array['name', 'id', 'kind', 'project', 'digest', 'plan']
          || case said ->> 'kind' when 'begin' then array[]::text[] else array['key', 'begun'] end) name);
    end if;
  end if;
  if is_right is not true then
    raise check_violation using message = 'A row of ' || tg_table_name || ' changes with its event alone.';
  end if;
  return null;
end $$;

create function people_follow() returns trigger language plpgsql security definer as $$
declare
  said json := said();
begin
  if (said ->> 'kind' = 'enrol' and (select count(distinct number) = count(*) and count(*) = (said ->> 'people')::bigint
      and min(number) = (said ->> 'first')::bigint and max(number) = min(number) + count(*) - 1
      and bool_and(length(pseudonym) = 16)
      and encode(sha256(string_agg(pseudonym, '' order by number)), 'hex') = said ->> 'names' from added)) is not true then
    raise check_violation using message = 'People are enrolled by their event alone.';
  end if;
  return null;
end $$;

create function run_is_reserved() returns trigger language plpgsql security definer as $$
begin
  if exists (select from run where id = new.id)
    and not exists (select from event where body::json ->> 'run' = new.id and body::json ->> 'kind' = 'reserve') then
    raise check_violation using message = 'A run comes with its event.';
  end if;
  return null;
end $$;

-- A function never looks into a temporary table of the caller's, and is of no use by itself.
do $$
declare one record;
begin
  for one in select oid::regprocedure as name from pg_proc where pronamespace = current_schema()::regnamespace
      and proname in ('event_form', 'said', 'is_done', 'given_back', 'is_table', 'event_is_legal', 'event_is_done',
        'head_follows', 'row_follows', 'people_follow', 'run_is_reserved') loop
    execute format('alter function %s set search_path = %I, pg_temp', one.name, current_schema());
    execute format('revoke execute on function %s from public', one.name);
  end loop;
end $$;

create trigger event_is_legal before insert or update or delete on event
  for each row execute function event_is_legal();

create trigger event_is_never_emptied before truncate on event for each statement execute function event_is_legal();

create constraint trigger event_is_done after insert on event deferrable initially deferred
  for each row execute function event_is_done();

create trigger head_follows before insert or update or delete on head for each row execute function head_follows();

create trigger people_follow after insert on person referencing new table as added
  for each statement execute function people_follow();

create constraint trigger run_is_reserved after insert on run deferrable initially deferred
  for each row execute function run_is_reserved();

do $$
declare name text;
begin
  foreach name in array array['fact', 'wish', 'quota', 'statement', 'part'] loop
    execute format('create trigger row_follows after insert or update or delete on %I
      for each row execute function row_follows()', name);
  end loop;
  foreach name in array array['run', 'person'] loop
    execute format('create trigger row_follows after update or delete on %I
      for each row execute function row_follows()', name);
  end loop;
  foreach name in array array['head', 'fact', 'wish', 'person', 'quota', 'run', 'part', 'statement'] loop
    execute format('create trigger is_never_emptied before truncate on %I
      for each statement execute function row_follows()', name);
  end loop;
end $$;
