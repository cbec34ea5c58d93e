import type { TranslationBundle } from '@jupyterlab/translation';
import * as React from 'react';

// With its ending, because the tests load this module as it is compiled, without a bundler.
import { endText, sessionName } from './format.js';
import type { ISession } from './tokens';

/** When the session ends, as a warning where its owner is warned; with a way to keep it where there is one. */
export function Ending({ session, trans, keep }: {
  session: ISession;
  trans: TranslationBundle;
  keep: (session: ISession) => void;
}): JSX.Element | null {
  const text = endText(session, Date.now(), trans);
  if (text === null) {
    return null;
  }
  if (session.warning === null) {
    return <div className="jp-fgpu-Minor">{text}</div>;
  }
  const name = sessionName(session, trans);
  return (
    <div className="jp-fgpu-Warning" role="alert">
      <div>{text}.</div>
      {session.can_keep && session.id !== null && (
        <button
          type="button"
          aria-label={trans.__('Keep running %1', name)}
          onClick={() => keep(session)}
        >
          {trans.__('Keep running')}
        </button>
      )}
    </div>
  );
}
