/**
 * What a notebook holds of a session: what its kernel saw when the cell ran. Pure.
 */
import type { IStatus } from './tokens';

export interface ISavedShare {
  text: string;
  /** When that was, in UTC seconds; null where it does not say. */
  atS: number | null;
  /** Its owner; null if unknown. */
  session: number | null;
}

/** Return what a cell's output holds; anybody may have written it. */
export function savedShare(data: unknown): ISavedShare {
  const given = (data ?? {}) as Record<string, unknown>;
  const { text, at_s, session } = given;
  return {
    text: typeof text === 'string' ? text : '',
    atS: typeof at_s === 'number' && Math.abs(at_s) < 1e11 ? at_s : null,
    session: typeof session === 'number' ? session : null
  };
}

/** Return whether it is of the session that this JupyterLab is in, so that what is now may stand there. */
export function isThisSession(saved: ISavedShare, status: IStatus): boolean {
  return saved.session !== null && saved.session === status.session?.id;
}
