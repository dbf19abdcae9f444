"""Every move of a job as one atomic script. The only clock is Redis's own, so that controllers may disagree on time.

A job is a hash; a waiting or running job has one entry in the stream; `attempt` counts its runs, and only the
newest run may end it. Terminal states never change. All scripts get KEYS in the order of `JobKeys`.
"""

PRELUDE = """
local job, stream, delayed, deadlines, dead = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local GROUP = 'workers'
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000
local function stamp(at) return string.format('%.6f', at) end
local TERMINAL = {succeeded = true, failed = true, canceled = true, expired = true}
local function is_over(key)
  local state = redis.call('HGET', key, 'state')
  return not state or TERMINAL[state]
end
local function leave_stream(key)
  local entry = redis.call('HGET', key, 'entry')
  if entry then
    redis.call('XACK', stream, GROUP, entry)
    redis.call('XDEL', stream, entry)
  end
end
local function finish(key, id, state, field, value, ttl_s, channel)
  redis.call('HSET', key, 'state', state, 'completed_at', stamp(now))
  if value ~= '' then redis.call('HSET', key, field, value) end
  leave_stream(key)
  redis.call('ZREM', delayed, id)
  redis.call('ZREM', deadlines, id)
  redis.call('EXPIRE', key, ttl_s)
  redis.call('PUBLISH', channel, id)
end
"""

# ARGV: id, idempotency hash, idempotency ttl_s, max queued, deadline_s, field, value, field, value …
# KEYS[6]: the tenant's list; KEYS[7]: the idempotency key (absent: none). Each submission looks at some entries of the
# list, chosen by chance, and removes those whose job has expired: so the list stays in proportion to what it lists.
SUBMIT = (
    PRELUDE
    + """
local id = ARGV[1]
if redis.call('EXISTS', job) == 1 then return {'new', id} end
if KEYS[7] then
  local known = redis.call('GET', KEYS[7])
  if known then
    local hash, other = string.match(known, '^(%S+) (%S+)$')
    if hash == ARGV[2] then return {'same', other} end
    return {'mismatch', other}
  end
end
if redis.call('XLEN', stream) + redis.call('ZCARD', delayed) >= tonumber(ARGV[4]) then return {'full', ''} end
local deadline = now + tonumber(ARGV[5])
for i = 6, #ARGV, 2 do redis.call('HSET', job, ARGV[i], ARGV[i + 1]) end
local entry = redis.call('XADD', stream, '*', 'id', id)
redis.call('HSET', job, 'id', id, 'state', 'queued', 'created_at', stamp(now), 'deadline_at', stamp(deadline),
  'attempt', 0, 'failures', 0, 'lost', 0, 'entry', entry)
for _, other in ipairs(redis.call('ZRANDMEMBER', KEYS[6], 10)) do
  if redis.call('EXISTS', string.sub(job, 1, #job - #id) .. other) == 0 then redis.call('ZREM', KEYS[6], other) end
end
redis.call('ZADD', KEYS[6], stamp(now), id)
if redis.call('TTL', KEYS[6]) < tonumber(ARGV[3]) then redis.call('EXPIRE', KEYS[6], ARGV[3]) end
redis.call('ZADD', deadlines, stamp(deadline), id)
if KEYS[7] then redis.call('SET', KEYS[7], ARGV[2] .. ' ' .. id, 'EX', ARGV[3]) end
return {'new', id}
"""
)

# ARGV: id, entry, max lost, ttl_s, channel, error when lost too often, error when expired
BEGIN = (
    PRELUDE
    + """
local id = ARGV[1]
if is_over(job) or redis.call('HGET', job, 'entry') ~= ARGV[2] then
  redis.call('XACK', stream, GROUP, ARGV[2])
  redis.call('XDEL', stream, ARGV[2])
  return {}
end
local state = redis.call('HGET', job, 'state')
if state ~= 'queued' and redis.call('HINCRBY', job, 'lost', 1) > tonumber(ARGV[3]) then
  redis.call('XADD', dead, 'MAXLEN', '~', 10000, '*', 'id', id, 'error', ARGV[6])
  finish(job, id, 'failed', 'error', ARGV[6], ARGV[4], ARGV[5])
  return {}
end
local left_s = tonumber(redis.call('HGET', job, 'deadline_at')) - now
if left_s <= 0 then
  finish(job, id, 'expired', 'error', ARGV[7], ARGV[4], ARGV[5])
  return {}
end
redis.call('HINCRBY', job, 'attempt', 1)
redis.call('HSETNX', job, 'started_at', stamp(now))
redis.call('HSET', job, 'state', 'starting')
local fields = redis.call('HGETALL', job)
table.insert(fields, 'left_s')
table.insert(fields, stamp(left_s))
return fields
"""
)

# ARGV: attempt
MARK_RUNNING = (
    PRELUDE
    + """
if redis.call('HGET', job, 'attempt') ~= ARGV[1] or redis.call('HGET', job, 'state') ~= 'starting' then return 0 end
redis.call('HSET', job, 'state', 'running')
return 1
"""
)

# ARGV: attempt, consumer. XCLAIM by its own consumer resets the entry's idle time: the lease is renewed.
HEARTBEAT = (
    PRELUDE
    + """
if is_over(job) or redis.call('HGET', job, 'attempt') ~= ARGV[1] then return 0 end
redis.call('XCLAIM', stream, GROUP, ARGV[2], 0, redis.call('HGET', job, 'entry'), 'JUSTID')
return 1
"""
)

# ARGV: id, attempt ('' for whichever), state, field, value, ttl_s, channel
FINISH = (
    PRELUDE
    + """
if is_over(job) or (ARGV[2] ~= '' and redis.call('HGET', job, 'attempt') ~= ARGV[2]) then return 0 end
finish(job, ARGV[1], ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7])
return 1
"""
)

# ARGV: id, attempt, error, delay_s, 1 when it counts as a failure, ttl_s, channel
RETRY = (
    PRELUDE
    + """
local id = ARGV[1]
if is_over(job) or redis.call('HGET', job, 'attempt') ~= ARGV[2] then return 0 end
if ARGV[5] == '1' then
  local failures = redis.call('HINCRBY', job, 'failures', 1)
  if failures >= tonumber(redis.call('HGET', job, 'max_attempts')) then
    redis.call('XADD', dead, 'MAXLEN', '~', 10000, '*', 'id', id, 'error', ARGV[3])
    finish(job, id, 'failed', 'error', ARGV[3], ARGV[6], ARGV[7])
    return 2
  end
end
leave_stream(job)
redis.call('HSET', job, 'state', 'queued')
redis.call('HDEL', job, 'entry')
redis.call('ZADD', delayed, stamp(now + tonumber(ARGV[4])), id)
return 1
"""
)

# ARGV: prefix of job keys, ttl_s, channel, error when expired. Returns the number of jobs moved.
TICK = (
    PRELUDE
    + """
local due = redis.call('ZRANGEBYSCORE', delayed, '-inf', stamp(now), 'LIMIT', 0, 100)
for _, id in ipairs(due) do
  redis.call('ZREM', delayed, id)
  if not is_over(ARGV[1] .. id) then
    redis.call('HSET', ARGV[1] .. id, 'entry', redis.call('XADD', stream, '*', 'id', id))
  end
end
local late = redis.call('ZRANGEBYSCORE', deadlines, '-inf', stamp(now), 'LIMIT', 0, 100)
for _, id in ipairs(late) do
  redis.call('ZREM', deadlines, id)
  if not is_over(ARGV[1] .. id) then finish(ARGV[1] .. id, id, 'expired', 'error', ARGV[4], ARGV[2], ARGV[3]) end
end
return #due + #late
"""
)
