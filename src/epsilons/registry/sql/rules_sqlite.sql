-- What SQLite refuses (docs/registry.md#events): a blank line ends a statement. The file has one owner, who can remove
-- these rules; they stop accidents and programs that know nothing of them. `verify` replays everything. Numbers are
-- compared with a tolerance, because SQLite may read the last digit of one differently.

create index event_run on event (json_extract(body, '$.run'));

-- The time of the last event, if it is one.
create view latest as select json_extract(body, '$.time') as time from event
  where number = (select number from head) and json_extract(body, '$.time')
    glob '[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]T[0-9][0-9]:[0-9][0-9]:[0-9][0-9]+00:00';

-- The last event, which rows of other tables follow.
create view said as select number, body, json_extract(body, '$.kind') as kind, json_extract(body, '$.run') as run
  from event where number = (select number from head);

create trigger event_is_next before insert on event begin
  select raise(abort, 'Events are only ever added, each after the last one, with its fields and in time.')
    where not exists (select 1 from head where new.number = head.number + 1 and new.previous = head.hash)
      or length(new.hash) <> 64 or length(new.body) > 65536
      or exists (select 1 from json_each(new.body) where key in ('key', 'ledger', 'previous', 'digest', 'names')
        and (length(value) <> 64 or value glob '*[^0-9a-f]*') and not (key = 'ledger' and value = ''))
      or json_extract(new.body, '$.time') < (select time from latest)
      or json_extract(new.body, '$.kind') = 'migrate'
        and json_extract(new.body, '$.was') is not (select value from fact where name = 'schema')
      or (new.number = 1) <> (json_extract(new.body, '$.kind') = 'create')
      or new.number > 1 and (select group_concat(key) from (select key from json_each(new.body) order by key)) is not
        case json_extract(new.body, '$.kind')
          when 'migrate' then 'kind,schema,time,was'
          when 'limit' then 'kind,refund,time'
          when 'wish' then 'delta,epsilon,home,id,kind,time'
          when 'enrol' then 'digest,first,kind,names,people,time'
          when 'change' then 'digest,kind,people,time'
          when 'withdraw' then 'digest,kind,people,time'
          when 'quota' then 'kind,project,share,time'
          when 'reserve' then 'digest,kind,project,run,time,what'
          when 'begin' then 'key,kind,ledger,previous,run,time'
          when 'settle' then 'charged,key,kind,ledger,run,time'
          when 'cancel' then 'kind,run,time'
          when 'approve' then 'charged,kind,ledger,run,time'
          when 'quarantine' then 'events,kind,reason,time' end;
end;

create trigger event_fits_its_run before insert on event
  when json_extract(new.body, '$.kind') in ('reserve', 'begin', 'settle', 'cancel', 'approve') begin
  select raise(abort, 'A run is reserved, begins, and is settled or cancelled, each once and in this order.')
    where not exists (select 1 from run where id = json_extract(new.body, '$.run') and
      case json_extract(new.body, '$.kind')
        when 'reserve' then state = 'reserved' and digest = json_extract(new.body, '$.digest')
          and project = json_extract(new.body, '$.project') and kind = json_extract(new.body, '$.what')
          and not exists (select 1 from event where json_extract(body, '$.run') = run.id)
          and exists (select 1 from part where part.run = run.id)
        when 'begin' then state in ('reserved', 'running') and key is json_extract(new.body, '$.previous')
          and coalesce(begun, json_extract(new.body, '$.ledger')) = json_extract(new.body, '$.ledger')
          and not exists (select 1 from event where json_extract(body, '$.run') = run.id
            and json_extract(body, '$.key') = json_extract(new.body, '$.key'))
        when 'settle' then state = 'running' and key = json_extract(new.body, '$.key')
        when 'cancel' then state = 'reserved'
        else state in ('reserved', 'running') end);
  select raise(abort, 'More steps are charged than the run reserved, or they are given back without a ledger.')
    where json_extract(new.body, '$.kind') = 'settle' and exists (
      select 1 from run, json_each(plan, '$.steps') as step
        left join json_each(new.body, '$.charged') as charged on charged.key = step.key
      where run.id = json_extract(new.body, '$.run')
        and (json_array_length(new.body, '$.charged') <> json_array_length(plan, '$.steps')
          or charged.type is not 'integer' or charged.value not between 0 and step.value
          or charged.value < step.value and json_extract(new.body, '$.ledger') = ''));
  select raise(abort, 'This gives back more steps than the owner of the registry allows without an approval. An officer approves it: epsilons registry approve URL RUN')
    where json_extract(new.body, '$.kind') in ('settle', 'cancel')
      and coalesce((select cast(value as real) from fact where name = 'refund'), 1) < (
        select 1 - coalesce(1.0 * sum(coalesce(json_extract(new.body, '$.charged[' || step.key || ']'), 0))
          / nullif(sum(step.value), 0), json_extract(new.body, '$.kind') = 'settle')
        from run, json_each(plan, '$.steps') as step where run.id = json_extract(new.body, '$.run'))
      and not exists (select 1 from event where json_extract(body, '$.run') = json_extract(new.body, '$.run')
        and json_extract(body, '$.kind') = 'approve'
        and json_extract(body, '$.ledger') = coalesce(json_extract(new.body, '$.ledger'), '')
        and (json_extract(body, '$.charged') = json_extract(new.body, '$.charged')
          or json_extract(new.body, '$.kind') = 'cancel' and json_extract(body, '$.charged') not glob '*[1-9]*'));
end;

create trigger event_is_kept before update on event begin
  select raise(abort, 'Events are only ever added.'); end;

create trigger event_is_not_removed before delete on event begin
  select raise(abort, 'Events are only ever added.'); end;

create trigger head_follows before update on head begin
  select raise(abort, 'The head is the last event.') where new.one <> old.one or new.number <> old.number + 1
    or not exists (select 1 from event where number = new.number and hash = new.hash); end;

create trigger head_is_kept before delete on head begin select raise(abort, 'The head is the last event.'); end;

create trigger run_begins_reserved before insert on run begin
  select raise(abort, 'A run begins as reserved.') where new.state <> 'reserved' or length(new.plan) > 16777216
    or coalesce(new.charged, new.key, new.ledger, new.begun) is not null; end;

create trigger run_follows before update on run begin
  select raise(abort, 'A run changes with its event alone.')
    where (new.id, new.kind, new.project, new.digest, new.plan)
        is not (old.id, old.kind, old.project, old.digest, old.plan)
      or not exists (select 1 from said where kind in ('migrate', 'quarantine') or run = new.id and case kind
        when 'begin' then new.state = 'running' and new.key = json_extract(body, '$.key')
          and new.begun = json_extract(body, '$.ledger') and coalesce(new.charged, new.ledger) is null
        when 'settle' then new.state = 'settled' and json(new.charged) = json_extract(body, '$.charged')
          and new.ledger = json_extract(body, '$.ledger') and (new.key, new.begun) is (old.key, old.begun)
        when 'cancel' then new.state = 'cancelled' and new.charged not glob '*[1-9]*' and new.ledger = ''
          and coalesce(new.key, new.begun) is null end); end;

create trigger run_is_kept before delete on run when (select kind from said) <> 'quarantine' begin
  select raise(abort, 'A run is kept.'); end;

create trigger part_comes_first before insert on part
  when length(new.rows) > 40000 or exists (select 1 from event where json_extract(body, '$.run') = new.run) begin
  select raise(abort, 'The roster of a run is written before its event, a page in at most 40,000 bytes.'); end;

create trigger part_is_kept before update on part begin select raise(abort, 'A roster is kept.'); end;

create trigger part_is_not_removed before delete on part when (select kind from said) <> 'quarantine' begin
  select raise(abort, 'A roster is kept.'); end;

create trigger statement_follows before insert on statement when length(new.rows) > 40000 or not exists (
    select 1 from said where number = new.event and kind in ('enrol', 'change', 'withdraw')) begin
  select raise(abort, 'A statement comes with its event, a page in at most 40,000 bytes.'); end;

create trigger statement_is_kept before update on statement begin select raise(abort, 'A statement is kept.'); end;

create trigger statement_is_not_removed before delete on statement when (select kind from said) <> 'quarantine' begin
  select raise(abort, 'A statement is kept.'); end;

create trigger person_is_kept before update on person begin select raise(abort, 'A person is kept.'); end;

create trigger person_is_not_removed before delete on person when (select kind from said) <> 'quarantine' begin
  select raise(abort, 'A person is kept.'); end;

create trigger wish_follows before insert on wish when not exists (select 1 from said where kind = 'wish'
    and new.id = json_extract(body, '$.id') and abs(new.epsilon / json_extract(body, '$.epsilon') - 1) < 1e-12
    and abs(new.delta / json_extract(body, '$.delta') - 1) < 1e-12) begin
  select raise(abort, 'A wish comes with its event.'); end;

create trigger wish_is_kept before update on wish begin select raise(abort, 'A wish is kept.'); end;

create trigger wish_is_not_removed before delete on wish when (select kind from said) <> 'quarantine' begin
  select raise(abort, 'A wish is kept.'); end;

create trigger quota_follows before insert on quota when not exists (select 1 from said where kind = 'quarantine'
    or kind = 'quota' and new.project = json_extract(body, '$.project')
    and abs(new.share / json_extract(body, '$.share') - 1) < 1e-12) begin
  select raise(abort, 'A quota changes with its event alone.'); end;

create trigger quota_is_changed before update on quota when not exists (select 1 from said where kind = 'quarantine'
    or kind = 'quota' and old.project = json_extract(body, '$.project') and new.project = old.project
    and abs(new.share / json_extract(body, '$.share') - 1) < 1e-12) begin
  select raise(abort, 'A quota changes with its event alone.'); end;

create trigger fact_follows before insert on fact when not exists (select 1 from said where
    kind = 'create' and new.value = json_extract(body, '$.' || new.name)
    or kind = 'limit' and new.name = 'refund' and abs(new.value - json_extract(body, '$.refund')) < 1e-12) begin
  select raise(abort, 'A fact comes with its event.'); end;

create trigger fact_is_changed before update on fact when not exists (select 1 from said where
    new.name = old.name and (kind = 'migrate' and new.name = 'schema' and new.value = json_extract(body, '$.schema')
    or kind = 'limit' and new.name = 'refund' and abs(new.value - json_extract(body, '$.refund')) < 1e-12)) begin
  select raise(abort, 'A fact changes with its event alone.'); end;

create trigger fact_is_kept before delete on fact begin select raise(abort, 'A fact is kept.'); end;
