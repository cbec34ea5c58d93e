/**
 * Which of the user's sessions there is something to tell of: each thing once. Pure but for what is kept.
 */
import type { Kept } from './once';
import type { ISession, IStatus } from './tokens';

/** Time before a session's end at which it is announced without an earlier warning. */
export const TELL_BEFORE_S = 600;

const WAITING = ['PENDING', 'SCHEDULED', 'PREPARING', 'PULLING'];

export interface INews {
  /** `ready`: it waited and runs now; `ends`: it is going to be ended; `keep`: that can be put off. */
  kind: 'ready' | 'ends' | 'keep';
  session: ISession;
}

/** Return what is new in a good status of the service, and remember that it was told. */
export function news(
  status: IStatus,
  now: number,
  waiting: Kept,
  told: Kept
): INews[] {
  const found: INews[] = [];
  const waited = new Set(waiting.items);
  for (const session of status.others) {
    if (session.state === 'RUNNING' && waited.has(String(session.id))) {
      if (told.first(`ready ${session.id}`)) {
        found.push({ kind: 'ready', session });
      }
    }
  }
  const waits = status.others
    .filter(session => WAITING.includes(session.state))
    .map(session => String(session.id));
  if (waits.join() !== [...waited].join()) {
    waiting.items = waits;
  }
  const all = [...(status.session === null ? [] : [status.session]), ...status.others];
  for (const session of all) {
    if (endsSoon(session, now) && told.first(`ends ${session.id} ${session.ends_at_s}`)) {
      found.push({ kind: session.can_keep ? 'keep' : 'ends', session });
    }
  }
  return found;
}

/** Return whether the end of a session is settled and near, or its owner is warned of it. */
export function endsSoon(session: ISession, now: number): boolean {
  return (
    session.state === 'RUNNING' &&
    session.ends_at_s !== null &&
    (session.warning !== null || session.ends_at_s - now / 1000 <= TELL_BEFORE_S)
  );
}
