/**
 * Events of the user's sessions that a notification announces. Pure except for the stored lists.
 */
import type { StoredList } from './storedlist';
import type { ISession, IStatus } from './tokens';

/** Seconds before a session's end at which it is announced without an earlier warning. */
const ANNOUNCE_BEFORE_S = 600;

const WAITING_STATES = ['PENDING', 'SCHEDULED', 'PREPARING', 'PULLING'];

export interface ISessionEvent {
  /** `ready`: it waited and runs now; `ends`: it will be ended; `keep`: it will be ended unless its user keeps it. */
  kind: 'ready' | 'ends' | 'keep';
  session: ISession;
}

/** Return the events in a status of the service that were not announced yet, and store them as announced. */
export function newEvents(
  status: IStatus,
  now: number,
  waiting: StoredList,
  announced: StoredList
): ISessionEvent[] {
  const events: ISessionEvent[] = [];
  const waitedBefore = waiting.items;
  for (const session of status.others) {
    const isReady = session.state === 'RUNNING' && waitedBefore.includes(String(session.id));
    if (isReady && announced.addNew(`ready ${session.id}`)) {
      events.push({ kind: 'ready', session });
    }
  }
  const waitingNow = status.others
    .filter(session => WAITING_STATES.includes(session.state))
    .map(session => String(session.id));
  if (waitingNow.join() !== waitedBefore.join()) {
    waiting.items = waitingNow;
  }
  for (const session of [status.session, ...status.others]) {
    if (
      session !== null &&
      endsSoon(session, now) &&
      announced.addNew(`ends ${session.id} ${session.ends_at_s}`)
    ) {
      events.push({ kind: session.can_keep ? 'keep' : 'ends', session });
    }
  }
  return events;
}

/** Return whether a session's end is near, or its owner is warned of it. */
function endsSoon(session: ISession, now: number): boolean {
  return (
    session.state === 'RUNNING' &&
    session.ends_at_s !== null &&
    (session.warning !== null || session.ends_at_s - now / 1000 <= ANNOUNCE_BEFORE_S)
  );
}
