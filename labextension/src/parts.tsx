import type { TranslationBundle } from '@jupyterlab/translation';
import * as React from 'react';

import {
  exactDurationText,
  parkedText,
  parkWarningText,
  sessionName,
  stateText
} from './format';
import type { IHubLocation } from './links';
import type { IProof, ISession, IStatus, ResizeRequest } from './tokens';

/** What the panel can do beyond showing; each asks the user where something would be lost. */
export interface IPanelActions {
  refresh(): void;
  stop(session: ISession): void;
  endThis(): void;
  renameThis(): void;
  keep(session: ISession): void;
  extend(session: ISession): void;
  park(session: ISession): void;
  neverPark(session: ISession, never: boolean): void;
  wake(session: ISession): void;
  /** Give a session another amount; rejects with a message to show. */
  resize(id: number, request: ResizeRequest): Promise<ISession>;
  /** What fgpu-verify has found; with `begin` it is run. */
  proof(begin: boolean): Promise<IProof>;
}

/** What every part of the panel needs. */
export interface IContext {
  trans: TranslationBundle;
  hub: IHubLocation;
  actions: IPanelActions;
}

/** The properties of a part that shows one session. */
export interface ISessionProps {
  session: ISession;
  context: IContext;
}

/** The properties of a part that shows the whole status. */
export interface IStatusProps {
  status: IStatus;
  context: IContext;
}

/** Marks numbers that no real GPU is behind. */
export function SimulatedMark({ trans }: { trans: TranslationBundle }): JSX.Element {
  return (
    <span
      className="jp-fgpu-Simulated"
      title={trans.__('No real GPU is behind these numbers.')}
    >
      {trans.__('simulated')}
    </span>
  );
}

/** The state of a session, in green while it has its GPU. */
export function StateMark(props: {
  session: ISession;
  trans: TranslationBundle;
}): JSX.Element {
  const { state } = props.session;
  return (
    <span
      className={`jp-fgpu-State${state === 'RUNNING' ? ' jp-fgpu-mod-running' : ''}`}
    >
      {stateText(state, props.trans)}
    </span>
  );
}

/** A part of the panel, under its title. */
export function Section(props: {
  title: string;
  children: React.ReactNode;
}): JSX.Element {
  return (
    <section aria-label={props.title}>
      <h3>{props.title}</h3>
      {props.children}
    </section>
  );
}

/** A bar of `percent` of its length, for those who see it; `text` says the same. */
export function Bar({ label, text, percent, high }: {
  label: string;
  text: string;
  percent: number;
  high?: boolean;
}): JSX.Element {
  return (
    <div
      className={`jp-fgpu-Bar${high ? ' jp-fgpu-mod-high' : ''}`}
      role="meter"
      aria-label={label}
      aria-valuemin={0}
      aria-valuemax={100}
      aria-valuenow={percent}
      aria-valuetext={text}
    >
      <div style={{ width: `${percent}%` }} />
    </div>
  );
}

/** A link to another page, which opens in a tab of its own. */
export function ExternalLink(props: {
  href: string | null;
  label?: string;
  children: React.ReactNode;
}): JSX.Element | null {
  return props.href === null ? null : (
    <a href={props.href} target="_blank" rel="noopener" aria-label={props.label}>
      {props.children}
    </a>
  );
}

/** The button that makes the time limit of a session longer, where that may be. */
export function Extend({ session, context }: ISessionProps): JSX.Element | null {
  const { trans, actions } = context;
  if (session.extend_by_s === null || session.id === null) {
    return null;
  }
  const by = exactDurationText(session.extend_by_s, trans);
  const name = sessionName(session, trans);
  return (
    <button
      type="button"
      aria-label={trans.__('Extend by %1: %2', by, name)}
      onClick={() => actions.extend(session)}
    >
      {trans.__('Extend by %1', by)}
    </button>
  );
}

/** How much memory a parked session keeps, or when a running one will be parked, with the buttons for both. */
export function Parking({ session, context }: ISessionProps): JSX.Element | null {
  const { trans, actions } = context;
  const text = parkedText(session, Date.now(), trans);
  const soon = parkWarningText(session, Date.now(), trans);
  const name = sessionName(session, trans);
  const never = session.never_park;
  const button = (words: string, label: string, title: string, onClick: () => void) => (
    <button type="button" aria-label={label} title={title} onClick={onClick}>
      {words}
    </button>
  );
  if (session.id === null || (text === null && !session.can_park)) {
    return null;
  }
  return (
    <div className="jp-fgpu-Parking">
      {text !== null && <div role="status">{text}</div>}
      {text !== null && session.wait_text !== null && (
        <div className="jp-fgpu-Minor">{session.wait_text}</div>
      )}
      {soon !== null && (
        <div className="jp-fgpu-Warning" role="status">
          {soon}
        </div>
      )}
      {session.park_refused && (
        <div role="status">{trans.__('Not parked: %1', session.park_refused)}</div>
      )}
      {session.parked !== null &&
        !session.parked.wanted &&
        button(
          trans.__('Get GPU'),
          trans.__('Get the GPU for %1', name),
          trans.__('Wait for the GPU before a cell needs it'),
          () => actions.wake(session)
        )}
      {session.can_park &&
        button(
          trans.__('Park'),
          trans.__('Park %1', name),
          trans.__('Give the GPU to others; kernels and variables stay'),
          () => actions.park(session)
        )}
      {never !== null &&
        button(
          never ? trans.__('Allow parking') : trans.__('Never park'),
          never
            ? trans.__('Allow parking of %1', name)
            : trans.__('Never park %1', name),
          never
            ? trans.__('Give the GPU to others while it is idle')
            : trans.__('Keep the GPU also while it is idle'),
          () => actions.neverPark(session, !never)
        )}
    </div>
  );
}
