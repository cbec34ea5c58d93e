/**
 * Why a session has ended, for its owner, and what they can do next. Pure.
 */
import type { TranslationBundle } from '@jupyterlab/translation';

import { asSentence } from './format.js';

/** How a session has ended, as the Hub's page of its server says it. */
export interface IEnd {
  cause: string | null;
  message: string;
}

/** Return why a session has ended and what to do, in a few sentences. */
export function endReasonText(end: IEnd, trans: TranslationBundle): string {
  const said = end.message && asSentence(end.message);
  switch (end.cause) {
    case 'USER':
      return said || trans.__('It was ended from JupyterLab or one of your pages.');
    case 'IDLE':
      return trans.__('It was idle, and was not kept running. Start it again when you need it.');
    case 'TIME_LIMIT':
      return trans.__('Its time limit is reached. Start it again, with a longer limit if you may choose one.');
    case 'PREEMPTED':
      return trans.__(
        'A request that goes first needed its GPU. Look at your sessions: it may wait in the queue again.'
      );
    case 'HUB_STOPPED':
      return trans.__('JupyterHub was stopped. Start the session again once it is back.');
    case 'OOM':
      return trans.__('It ran out of memory. Start it again with more memory.');
    case 'DISK_LIMIT':
      return [
        trans.__('It used too much disk space. Remove what you do not need once it runs again.'),
        said
      ]
        .join(' ')
        .trim();
    case 'NODE_LOST':
      return trans.__('Its machine was lost. Start it again, and it gets another one.');
    case 'ISOLATION_FAILED':
      return trans.__(
        'Its GPU limit was not in force. Start it again. If this happens twice, tell your administrator.'
      );
    case 'EXITED':
      return [trans.__('Its server stopped. Start it again.'), said].join(' ').trim();
    default:
      return said || trans.__('The reason is not known. Your sessions page may tell more.');
  }
}
