/**
 * Ending all of the user's other sessions at once. Pure but for what it is given.
 */
import type { ISession } from './tokens';

/** End or cancel each by itself, and return why some were not; one that is refused does not keep the others. */
export async function stopAll(
  sessions: readonly ISession[],
  stop: (id: number) => Promise<void>
): Promise<string[]> {
  const ending = sessions
    .map(session => (session.state === 'TERMINATING' ? null : session.id))
    .filter((id): id is number => id !== null);
  const done = await Promise.allSettled(ending.map(stop));
  return done.flatMap(one =>
    one.status === 'fulfilled'
      ? []
      : [one.reason instanceof Error ? one.reason.message : String(one.reason)]
  );
}
