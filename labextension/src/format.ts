/**
 * Text for the status, the sessions and their amounts. Pure.
 */
import type { TranslationBundle } from '@jupyterlab/translation';

import type { Meter } from './service';
import type { IProcess, IReading, ISession, IStatus, IThisSession } from './tokens';

/** Returns text about something at this moment (in ms), or null where there is nothing to say. */
type TextOf<T> = (of: T, now: number, trans: TranslationBundle) => string | null;

/** Return the message of anything that was thrown. */
export function errorText(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}

/** Return the name of a session for the middle of a sentence. */
export function sessionName(session: ISession, trans: TranslationBundle): string {
  return session.display_name || trans.__('the session');
}

/** Return "512 / 2048 MiB", or the limit alone where the use is not known. */
export function memoryText(
  usedMib: number | null,
  limitMib: number | null,
  trans: TranslationBundle
): string | null {
  if (limitMib === null) {
    return usedMib === null ? null : trans.__('%1 MiB used', usedMib);
  }
  return usedMib === null
    ? trans.__('%1 MiB', limitMib)
    : trans.__('%1 / %2 MiB', usedMib, limitMib);
}

/** Return the GPU memory in use as seen from inside the session, or else as measured by its machine. */
export function usedMib(session: IThisSession): number | null {
  return session.gpu_memory_used_mib ?? session.meter?.memory_used_mib ?? null;
}

/** Return "0.5 fGPU" or "5 GiB + 25 %", or null where the amount is not known. */
export function amountText(
  session: ISession,
  trans: TranslationBundle
): string | null {
  if (session.amount !== null) {
    return session.amount;
  }
  return session.fgpu === null ? null : trans.__('%1 fGPU', session.fgpu);
}

/** Return the part of the memory in use that contexts and code take, or null where unknown. */
export function contextText(
  meter: Meter | null,
  trans: TranslationBundle
): string | null {
  return meter?.memory_context_mib
    ? trans.__(
        '%1 MiB of it for CUDA contexts and code',
        meter.memory_context_mib
      )
    : null;
}

/** Return the compute in use, beyond the share as share + borrowed; `entitled` is null without a limit. */
export function computeText(
  computed: number,
  entitled: number | null,
  meter: Pick<Meter, 'compute_lent_percent'>,
  trans: TranslationBundle
): string {
  const now = Math.round(computed);
  if (entitled === null) {
    return trans.__('%1 % of the GPU in use', now);
  }
  if (now <= entitled) {
    return trans.__('%1 of %2 % in use', now, entitled);
  }
  return meter.compute_lent_percent === null
    ? trans.__('%1 % in use, your share is %2 %', now, entitled)
    : trans.__('%1 % in use: %2 % share + %3 % borrowed', now, entitled, now - entitled);
}

/** Return the part of a session's share that others use, or null if it is zero or unknown. */
export function lentText(
  computed: number,
  entitled: number,
  meter: Pick<Meter, 'compute_lent_percent'>,
  trans: TranslationBundle
): string | null {
  const lent = Math.round(meter.compute_lent_percent ?? 0);
  return lent > 0 && Math.round(computed) <= entitled
    ? trans.__('Others now use %1 % of it', lent)
    : null;
}

/** Return "Idle: ...; it ends at 14:20", "Ends at 14:20" without a warning, or null without an end. */
export const endText: TextOf<ISession> = (session, now, trans) => {
  const at =
    session.ends_at_s === null
      ? null
      : instantText(session.ends_at_s, now);
  if (session.warning === null) {
    return at === null ? null : trans.__('Ends at %1', at);
  }
  const warning =
    session.warning.charAt(0).toUpperCase() + session.warning.slice(1);
  return at === null ? warning : trans.__('%1; it ends at %2', warning, at);
};

/** Return the text of the status bar, or null where it stays empty. */
export const statusBarText: TextOf<IReading> = (reading, now, trans) => {
  const { server, status } = reading;
  if (server === 'missing') {
    return trans.__('fGPU: no server extension');
  }
  if (status === null) {
    return server === 'offline' ? trans.__('fGPU: offline') : null;
  }
  const parts: string[] = [];
  if (status.session !== null) {
    parts.push(...sessionParts(status.session, now, trans));
  } else if (status.hub === 'absent') {
    return null;
  } else if (status.hub === 'ok') {
    parts.push(trans.__('no fGPU'));
  } else {
    parts.push(trans.__('fGPU'));
  }
  if (server === 'offline') {
    parts.push(trans.__('offline'));
  } else if (status.hub === 'unreachable') {
    parts.push(trans.__('service down'));
  } else if (status.hub === 'forbidden') {
    parts.push(trans.__('no access'));
  }
  return parts.join(' · ');
};

function sessionParts(
  session: IThisSession,
  now: number,
  trans: TranslationBundle
): string[] {
  const memory = memoryText(usedMib(session), session.gpu_memory_mib, trans);
  const parts = [amountText(session, trans) ?? trans.__('fGPU')];
  if (memory !== null) {
    parts.push(memory);
  }
  if (session.state !== 'RUNNING') {
    parts.push(stateText(session.state, trans));
  } else if (session.warning !== null && session.ends_at_s !== null) {
    parts.push(trans.__('ends at %1', instantText(session.ends_at_s, now)));
  }
  if (session.simulated) {
    parts.push(trans.__('simulated'));
  }
  return parts;
}

/** Return the problem with the age of the data that is shown, or null without a problem. */
export const problemWithAgeText: TextOf<IReading> = (reading, now, trans) => {
  const text = problemText(reading, trans);
  const stale = staleText(reading, now, trans);
  return text === null || stale === null ? text : `${text} ${stale}`;
};

/** Return the problem with the server or the service, or null without one. */
export function problemText(
  { server, status }: IReading,
  trans: TranslationBundle
): string | null {
  if (server === 'missing') {
    return trans.__(
      'The server extension jupyterlab_fgpu is not running on this Jupyter server. It comes with the Python package jupyterlab-fgpu.'
    );
  }
  if (server === 'offline') {
    return trans.__('This Jupyter server does not answer.');
  }
  if (status === null || status.hub === 'ok') {
    return null;
  }
  return status.hub_message ?? trans.__('The fGPU service has a problem.');
}

/** Return the age of the data that is shown, or null while it is current. It changes every second. */
export const staleText: TextOf<IReading> = (reading, now, trans) => {
  const { server, status } = reading;
  const offline = server === 'offline' && status !== null;
  const age = offline ? (ageS(reading, now) ?? 0) : ageS(reading, now);
  const unreachable = server !== 'missing' && status?.hub === 'unreachable';
  return (offline || unreachable) && age !== null
    ? trans.__('You see what it said %1 ago.', durationText(age, trans))
    : null;
};

/** Return the service's text with a capital and a full stop. */
export function asSentence(text: string): string {
  const whole = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?]$/.test(whole) ? whole : `${whole}.`;
}

/** Return the age of the service's data in seconds at `now`, or null without data. */
export function ageS(reading: IReading, now: number): number | null {
  const { status } = reading;
  if (status === null) {
    return null;
  }
  const inTabS = Math.max(0, (now - reading.receivedAt) / 1000);
  if (reading.server === 'offline') {
    return Math.round((status.as_of_s ?? 0) + inTabS);
  }
  return status.as_of_s === null ? null : Math.round(status.as_of_s + inTabS);
}

/** Return a duration in its largest unit, rounded down. */
export function durationText(seconds: number, trans: TranslationBundle): string {
  if (seconds < 60) {
    return trans.__('%1 s', Math.floor(seconds));
  }
  if (seconds < 3600) {
    return trans.__('%1 min', Math.floor(seconds / 60));
  }
  return trans.__('%1 h', Math.floor(seconds / 3600));
}

/** Return "1 h", "1 h 30 min" or "30 min": parts that are zero are left out. */
export function exactDurationText(seconds: number, trans: TranslationBundle): string {
  return seconds >= 3600 && seconds % 3600 >= 60
    ? hoursMinutesText(seconds, trans)
    : durationText(seconds, trans);
}

/** Return a duration as "1 h 0 min", rounded down, or one below an hour in its largest unit. */
export function hoursMinutesText(seconds: number, trans: TranslationBundle): string {
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) {
    return durationText(Math.max(0, seconds), trans);
  }
  return trans.__('%1 h %2 min', Math.floor(minutes / 60), minutes % 60);
}

/** Return whether the session's server runs, with a GPU or parked. */
export function isServerRunning(session: ISession): boolean {
  return ['RUNNING', 'PARKED', 'RESUMING'].includes(session.state);
}

/** Return the message for a failed start script, else null. */
export function scriptText(
  script: IStatus['script'],
  trans: TranslationBundle
): string | null {
  if (script?.state !== 'failed') {
    return null;
  }
  return script.status === null
    ? trans.__(
        'Your variables and start script could not be read. The session runs without them.'
      )
    : trans.__(
        'Your start script failed with status %1. The session runs on.',
        script.status
      );
}

/** Return the state in plain words; one that this version does not know stays as it is. */
export function stateText(state: string, trans: TranslationBundle): string {
  switch (state) {
    case 'PENDING':
      return trans.__('Waiting');
    case 'SCHEDULED':
    case 'PREPARING':
      return trans.__('Starting');
    case 'PULLING':
      return trans.__('Fetching image');
    case 'RUNNING':
      return trans.__('Running');
    case 'PARKED':
      return trans.__('Parked');
    case 'RESUMING':
      return trans.__('Getting its GPU');
    case 'TERMINATING':
      return trans.__('Ending');
    case 'TERMINATED':
      return trans.__('Ended');
    case 'CANCELLED':
      return trans.__('Cancelled');
    case 'ERROR':
      return trans.__('Failed');
    default:
      return state;
  }
}

/** Return "Next in the queue, about 14:20", or null for a session that does not wait. */
export const queueText: TextOf<ISession> = (session, now, trans) => {
  if (session.state !== 'PENDING' && !session.parked?.wanted) {
    return null;
  }
  const place =
    session.position === null
      ? trans.__('In the queue')
      : session.position === 1
        ? trans.__('Next in the queue')
        : trans.__('%1 in the queue', ordinal(session.position));
  return `${place}, ${startText(session, now, trans)}`;
};

/** Return how much memory a parked session keeps and how it gets its GPU, or null for other sessions. */
export const parkedText: TextOf<ISession> = (session, now, trans) => {
  if (session.state === 'RESUMING') {
    return trans.__('The GPU memory is being copied back.');
  }
  if (session.parked === null) {
    return null;
  }
  const kept =
    session.parked.memory_mib > 0
      ? trans.__('%1 MiB of GPU memory kept.', session.parked.memory_mib)
      : trans.__('No GPU memory is held.');
  const queue = queueText(session, now, trans);
  return queue === null
    ? trans.__('%1 Run a cell that uses the GPU to get it.', kept)
    : trans.__('%1 Waits for its GPU: %2', kept, queue);
};

/** Return the line of a cell while its session waits for the GPU, or null while it does not wait. */
export const waitText: TextOf<ISession> = (session, now, trans) => {
  if (session.state === 'RESUMING') {
    return trans.__('The GPU is there. Its memory is being copied back.');
  }
  const queue = session.parked && queueText(session, now, trans);
  return queue ? trans.__('This session waits for its GPU. %1.', queue) : null;
};

/** Return when an idle session will be parked, or null while no time is known. */
export const parkWarningText: TextOf<ISession> = (session, now, trans) => {
  const left = (session.meter?.parks_at_s ?? 0) - now / 1000;
  return left > 0
    ? trans.__(
        'Parked in %1 if the GPU stays idle. Your variables stay.',
        durationText(left, trans)
      )
    : null;
};

/** Return "1st", "2nd", "11th", as the pages say it. */
function ordinal(n: number): string {
  const teen = n % 100 > 10 && n % 100 < 14;
  return n + ((!teen && ['th', 'st', 'nd', 'rd'][n % 10]) || 'th');
}

/** A shorter range is shown as one instant. */
const NARROW_S = 600;

function startText(
  session: ISession,
  now: number,
  trans: TranslationBundle
): string {
  const { early_start_at_s: early, late_start_at_s: late } = session;
  if (session.expected_start_at_s === null) {
    return trans.__('start time not known');
  }
  if (session.forecast_basis === 'time limits') {
    return trans.__(
      'at the latest %1',
      instantText(session.expected_start_at_s, now)
    );
  }
  return early === null || late === null || late - early < NARROW_S
    ? trans.__('about %1', instantText(session.expected_start_at_s, now))
    : trans.__(
        'probably between %1 and %2',
        instantText(early, now),
        instantText(late, now)
      );
}

/** Return local time, with its day if that is not today. */
export function instantText(atS: number, now: number): string {
  const instant = new Date(atS * 1000);
  const time: Intl.DateTimeFormatOptions = {
    hour: 'numeric',
    minute: '2-digit'
  };
  return instant.toDateString() === new Date(now).toDateString()
    ? instant.toLocaleTimeString([], time)
    : instant.toLocaleString([], {
        ...time,
        weekday: 'short',
        day: 'numeric',
        month: 'short'
      });
}

/** Return a kernel by its notebook, any other process by its name and number. */
export function processText(
  process: IProcess,
  own: string | undefined,
  trans: TranslationBundle
): string {
  if (process.notebook !== null) {
    return process.notebook === own
      ? trans.__('this notebook')
      : process.notebook;
  }
  return process.name === null
    ? trans.__('process %1', process.pid)
    : trans.__('%1 (process %2)', process.name, process.pid);
}
