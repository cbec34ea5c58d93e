// With its ending, because the tests load this module as it is compiled, without a bundler.
import { errorText } from './format.js';
import type { ISession } from './tokens';

/** End or cancel the sessions independently of each other, and return the messages of the failures. */
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
      : [errorText(one.reason)]
  );
}
